"""Teachers that tests shrink, and one of them with mixed attention logits."""
