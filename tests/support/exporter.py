"""What torch.onnx does again and again in an export, tests do once; the graphs are the same."""

from functools import cache
from typing import Any


@cache
def quicken_exports() -> None:
    """Nothing where torch and onnxscript have these things elsewhere."""
    try:
        _keep_registry()
        _compare_operators_first()
    except ImportError:
        return


def _keep_registry() -> None:
    """Give every export a copy of one table of operators, which takes a second to make."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset: Any, **options: Any) -> ONNXRegistry:
        made = make(*opset, **options)
        copied = ONNXRegistry()
        copied.__dict__.update(made.__dict__)
        copied.functions = {target: list(meanings) for target, meanings in made.functions.items()}
        return copied

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


def _compare_operators_first() -> None:
    """Spare the optimiser a list of all nodes for each node and pattern of several outputs, which is quadratic."""
    from onnxscript.rewriter._basics import MatchResult
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    match = SimplePatternMatcher.match

    def match_same_operator(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> MatchResult:
        wanted = matcher.pattern.output_nodes[0].op_identifier()
        if wanted not in (None, node.op_identifier()):
            return MatchResult().fail("another operator")
        return match(matcher, model, graph, node, **options)

    SimplePatternMatcher.match = match_same_operator
