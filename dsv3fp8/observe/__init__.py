"""What runs looked like, read from their directories; looking never changes a result."""
