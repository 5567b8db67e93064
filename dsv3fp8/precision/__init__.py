"""What every op computes in and every tensor is carried in: formats, tiles, recipes. Knows no model."""
