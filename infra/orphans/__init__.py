"""Lists what a stack left in its cloud: resources that carry its tags or belong to its cluster and are in no state."""
