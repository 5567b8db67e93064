"""How the work is cut over GPUs: the layout, and which layouts can work."""
