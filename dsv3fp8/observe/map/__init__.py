"""The observed precision map of one block: what every op computed in, what every tensor was carried in, what was kept."""
