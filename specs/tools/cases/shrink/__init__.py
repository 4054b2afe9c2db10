"""Cases of ``specs/shrink.md``: heads, the layer's other matrices, and the predictor."""
