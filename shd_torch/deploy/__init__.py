"""Graphs as onnxruntime runs them on the CPU: drawn inputs, products in int8, and how long a run takes.

``inputs.py`` draws what a graph takes, ``int8.py`` quantises its products and measures what that costs, ``timing.py``
times several graphs by turns. Nothing here needs PyTorch.
"""

from shd_torch.deploy.int8 import Int8Report as Int8Report
from shd_torch.deploy.int8 import quantize_graph as quantize_graph
from shd_torch.deploy.timing import GraphTime as GraphTime
from shd_torch.deploy.timing import Interval as Interval
from shd_torch.deploy.timing import time_graphs as time_graphs
