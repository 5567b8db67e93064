"""Training steps on many GPUs of one machine, layout by layout, beside one GPU and beside what `plan` forecasts."""
