"""One file a box of the precision contract: forward, backward, and what is kept in between. Knows no layer or config."""
