"""Teachers that tests shrink, and one of them with mixed attention logits."""

import pytest

pytest.importorskip("transformers", reason="students are Hugging Face models: pip install '.[hf]' (in a checkout)")
