"""``attention_kl`` as the judge of ``specs/conformance.md`` calls it: the loss and its gradients, by one backend.

Logits that are given as such are products too, of themselves with the identity: ``z = z I^T``. So every case of the
loss and of its gradients goes through the backend's own products. The gradient of the logits is that of the queries
then; ``sdpa``, which shifts keys and forms no map, rounds it where it is exactly 0 and does not offer it. Maps are
products as well, as the kernels read them: ``A~ = rho softmax(log(A~ / rho) I^T)``.
"""

from typing import Any

import torch
from torch import Tensor

from shd_ref import ShdError
from shd_ref.integers import check_number
from shd_torch.checks import check_attn_mask, check_option, check_probs, check_real, compute_dtype
from shd_torch.kl import attention_kl, explain_backend
from shd_torch.maps.judged import Adapter
from shd_torch.maps.loss import DIVERGENCES, Layers, match_layers
from shd_torch.supervision import Dense, Factored
from shd_torch.supervision.mask import is_allowed

OPERATIONS: tuple[str, ...] = ("shd_loss", "shd_loss_gradient", "shd_loss_gradient_qk")


class KlAdapter(Adapter):
    """Runs ``OPERATIONS`` through ``attention_kl``; what it or the backend lacks is missing, and never another's."""

    def __init__(self, backend: str, device: str | torch.device | None = None) -> None:
        super().__init__(device)
        self.backend = backend

    def call(self, operation: str, **arguments: Any) -> Any:
        """One operation on tensors."""
        if operation not in OPERATIONS or (operation == "shd_loss_gradient" and self.backend == "sdpa"):
            raise NotImplementedError(f"attention_kl has no {operation} by {self.backend}")
        divergence = arguments.pop("divergence", "kl")
        check_option("divergence", divergence, DIVERGENCES, "LOSS-11")
        if divergence != "kl":
            raise NotImplementedError(f"attention_kl has no divergence {divergence}")
        row_sums, attn_mask = arguments.pop("row_sums", "one"), arguments.pop("attn_mask", None)
        maps = arguments.pop("supervision")
        if operation == "shd_loss_gradient_qk":
            check_number("scale", arguments["scale"], "GRAD-8")
            student_input: Layers = arguments["queries"]
            taught, q, k = match_layers(
                supervision=maps, queries=arguments.pop("queries"), keys=arguments.pop("keys")
            )
            # Before they are widened, which would hide what they were.
            for name, layers in (("queries", q), ("keys", k)):
                for layer, tensor in enumerate(layers):
                    check_real(tensor, name, check=True, ndim=4, layer=layer)
            masks = [attn_mask] * len(q)
        else:
            student_input = arguments.pop("student_logits")
            taught, logits = match_layers(supervision=maps, student_logits=student_input)
            q, k, masks = [], [], []
            for layer, z in enumerate(logits):
                _check_maps_fit(taught[layer], z, layer)
                q.append(z.masked_fill(torch.isneginf(z), 0.0))
                k.append(torch.eye(z.shape[3], dtype=z.dtype, device=z.device).expand(z.shape[0], 1, -1, -1))
                masks.append(_join(attn_mask, ~torch.isneginf(z)))
            arguments["scale"] = 1.0
        for mask, queries, keys in zip(masks, q, k, strict=True):
            if mask is not None and queries.ndim == keys.ndim == 4:
                check_attn_mask(mask, (*queries.shape[:3], keys.shape[2]))
        for layer, probs in enumerate(taught):
            # attention_kl lets rows that do not count hold anything; the operations do not (MAP-3, MAP-5).
            check_probs(probs, "supervision", check=True, layer=layer, row_sums=None)
        loss, leaves = self._run(q, k, [Dense(probs, row_sums=row_sums) for probs in taught], masks, arguments)
        if operation == "shd_loss":
            return loss.detach()
        dq, dk = leaves[: len(q)], leaves[len(q) :]
        gradients = (dq, dk) if operation == "shd_loss_gradient_qk" else (dq,)
        answers = tuple(gradient[0] if isinstance(student_input, Tensor) else gradient for gradient in gradients)
        return answers if len(answers) > 1 else answers[0]

    def _run(
        self,
        queries: list[Tensor],
        keys: list[Tensor],
        supervision: list[Dense],
        masks: list[Tensor | None],
        arguments: dict[str, Any],
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, and its gradients in float32 or wider."""
        wide = [tensor.to(compute_dtype(tensor)).requires_grad_() for tensor in (*queries, *keys)]
        q, k = wide[: len(queries)], wide[len(queries) :]
        if len({id(mask) for mask in masks}) == 1:
            loss = self._loss(q, k, supervision, attn_mask=masks[0], **arguments)
        else:
            # attention_kl has one mask for all layers; logits that hold their own give each layer another.
            reduction = arguments.pop("reduction", "sum")
            check_option("reduction", reduction, ("sum", "mean"), "LOSS-5")
            mean = reduction == "mean"
            shares = [query.shape[1] / sum(one.shape[1] for one in q) if mean else 1.0 for query in q]
            loss = torch.stack(
                [
                    share * self._loss([q[i]], [k[i]], [supervision[i]], attn_mask=masks[i], **by_layer)
                    for i, share in enumerate(shares)
                    for by_layer in [arguments | {"reduction": "mean" if mean else "sum"}]
                ]
            ).sum()
        return loss, list(torch.autograd.grad(loss, wide))

    def _loss(self, q: list[Tensor], k: list[Tensor], supervision: Any, **arguments: Any) -> Tensor:
        for choice in explain_backend(q, k, supervision, **arguments):
            if self.backend in choice.refused:
                raise NotImplementedError(f"{self.backend}: {choice.refused[self.backend]}")
        return attention_kl(q, k, supervision, backend=self.backend, **arguments)


def _check_maps_fit(maps: Tensor, logits: Tensor, layer: int) -> None:
    check_real(logits, "student_logits", check=True, ndim=4, allow_minus_inf=True, layer=layer)
    if maps.shape != logits.shape:
        raise ShdError(
            "argument-shape",
            f"supervision must have the shape of student_logits in layer {layer}; got {tuple(maps.shape)}",
            "LOSS-3",
        )


def _join(attn_mask: Tensor | None, finite: Tensor) -> Tensor | None:
    if attn_mask is not None:
        check_attn_mask(attn_mask, finite.shape)
    if finite.all():
        return attn_mask
    return finite if attn_mask is None else finite & attn_mask


_NEVER = -1e4  # its exponential is exactly 0, and every product keeps it finite


_DOMAIN = (
    16.0  # the largest logit whose rounding to float32 leaves gradients within NUM-4 (kernels in tolerances.json)
)


class KernelAdapter(KlAdapter):
    """Runs ``OPERATIONS`` by the backend ``triton``.

    float64, large heads, masks of heads or rows, and logits above ``_DOMAIN`` are missing: the kernels keep a logit
    and its log-sum-exp as float32 numbers, of which large ones differ by more than the tolerance of a gradient.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        super().__init__("triton", device)

    def _loss(self, q: list[Tensor], k: list[Tensor], supervision: list[Dense], **arguments: Any) -> Tensor:
        explain_backend(q, k, supervision, **arguments)  # errors about the arguments, for the maps themselves
        size = abs(arguments["scale"]) / arguments.get("temperature", 1.0)
        for queries, keys in zip(q, k, strict=True):
            products = queries.reshape(len(keys), keys.shape[1], -1, keys.shape[3]) @ keys.mT
            if products.numel() and float(size * products.detach().abs().max()) > _DOMAIN:
                raise NotImplementedError(f"the kernels take logits up to {_DOMAIN:g}")
        shape = (*q[0].shape[:3], k[0].shape[2])
        arguments |= _describe_mask(arguments.pop("attn_mask", None), shape) | {"check": False}
        shared = {name: arguments[name] for name in ("attn_mask", "is_causal")}
        temperature = arguments.get("temperature", 1.0)
        taught = [_factor_maps(maps, temperature, shared) for maps in supervision]
        return super()._loss(q, k, taught, **arguments)


def _factor_maps(supervision: Dense, temperature: float, masks: dict[str, Any]) -> Factored:
    """The same maps as queries, keys that are the identity, and a mass for each row."""
    maps = supervision.maps.to(supervision.dtype)
    batch, heads, _, num_keys = maps.shape
    mass = maps.sum(-1)
    logits = temperature * (maps / mass.clamp_min(torch.finfo(maps.dtype).tiny)[..., None]).log()
    keys, mixing = (torch.eye(size, dtype=maps.dtype, device=maps.device) for size in (num_keys, heads))
    if supervision.row_sums == "one":
        if ((mass - 1).abs() > 8 * torch.finfo(maps.dtype).eps * num_keys).logical_and(mass != 0).any():
            raise NotImplementedError("factors make rows that sum to one, and to nothing near it")
        mass = (mass > 0).to(maps.dtype)
    return Factored(
        logits.clamp_min(_NEVER),
        keys.expand(batch, 1, -1, -1),
        mixing.expand(batch, -1, -1),
        scale=1.0,
        groups=tuple((head,) for head in range(heads)),
        row_mass=mass,
        **masks,
    )


def _describe_mask(mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """A mask as a mask of keys and causality where that says the same, else as it is."""
    if mask is None:
        return {"attn_mask": None, "is_causal": False}
    allowed = is_allowed(mask).expand(shape)
    keys = allowed.any((1, 2), keepdim=True)
    causal = torch.ones(shape[2:], dtype=torch.bool, device=mask.device).tril()
    for is_causal in (False, True):
        if torch.equal(allowed, (keys & causal if is_causal else keys).expand(shape)):
            return {"attn_mask": None if keys.all() else keys, "is_causal": is_causal}
    return {"attn_mask": mask, "is_causal": False}
