"""Writing the merge into a graph.

1. ``function``: one merge plan as an ONNX function: Gram matrices, alphas, merged maps, codes.
2. ``tiles``: the same on some query rows at a time, where whole maps would be large.
3. ``squeeze``: calls of both at every site, new outputs, and nothing that no output needs.
"""
