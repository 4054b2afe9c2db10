"""Writing the merge into a graph: one ONNX function per plan, new outputs, and what is not needed pruned."""
