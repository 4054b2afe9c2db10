"""Which pairs of option values some item of the judge checks together, and which none does."""
