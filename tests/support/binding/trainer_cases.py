"""Students, samples, a cache and trainers of SHDTrainer's tests."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="SHDTrainer needs the extra 'hf'")
pytest.importorskip("accelerate", reason="transformers' trainer needs accelerate")

import transformers

from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, SHDTrainer
from support.binding.models import sharpen
from support.exported_models import trace

LENGTHS = (12, 7, 9, 12, 3, 12, 5, 8)


def make_model(heads: int, seed: int, layers: int = 2, width: int = 16, vocabulary: int = 30) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    return sharpen(transformers.LlamaForCausalLM(config), ("q_proj", "k_proj"))


def make_samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(3, 30, (length,), generator=generator)
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return samples


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def write_cache(folder: Path, **more: Any) -> Path:
    """The cache of ``make_samples`` by an exported teacher, merged maps as they are; more options of precompute."""
    arrays = {name: value.numpy() for name, value in pad(make_samples()).items() if name != "labels"}
    if not (folder / "teacher.onnx").exists():
        export(folder)
    options = PrecomputeOptions(**({"num_student_heads": 2, "codec": "float32"} | more))
    shown = {key: len(value) if key == "with_teachers" else value for key, value in more.items()}
    name = "-".join(["cache", *(f"{key}={value}" for key, value in shown.items())])
    precompute(folder / "teacher.onnx", arrays, folder / name, options, RunOptions(num_threads=1))
    return folder / name


def export(folder: Path, seed: int = 1) -> None:
    pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
    arrays = {name: value.numpy() for name, value in pad(make_samples()).items() if name != "labels"}
    example = {name: torch.from_numpy(value[:2]) for name, value in arrays.items()}
    trace(make_model(4, seed=seed), example, folder / "teacher.onnx")


def make_trainer(out: Path, *, train: Any, **options: Any) -> SHDTrainer:
    arguments: dict[str, Any] = {"output_dir": str(out), "per_device_train_batch_size": 4, "max_steps": 2, "seed": 3}
    arguments |= {"learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "sgd"}
    arguments |= {
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    arguments |= options.pop("arguments", {})
    return SHDTrainer(
        model=options.pop("model", None) or make_model(2, seed=2),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=train,
        data_collator=options.pop("collate", pad),
        **options,
    )


def trained(out: Path, **arguments: Any) -> SHDTrainer:
    trainer = make_trainer(out, **arguments)
    trainer.train()
    return trainer


def live(seed: int = 1, **options: Any) -> OnlineTeacher:
    return OnlineTeacher(make_model(4, seed=seed), 2, 2, **options)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerances: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=name, **tolerances)


CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def weights(trainer: SHDTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
