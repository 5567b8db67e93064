"""What a layout over GPUs takes: memory, bytes on the wire and time, from sizes and measured rates alone."""
