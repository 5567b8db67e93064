"""The drift study: what the tensor core's short accumulator, and the casts around it, cost a sum."""
