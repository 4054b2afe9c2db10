"""From a teacher and a wish, such as "four times faster", to a student that is deployed; ``run.py`` is the way in.

``samples.py`` reads the data, ``task.py`` knows what a model is for and how good it is, ``space.py`` what may be cut,
``costs.py`` what parts cost, ``worth.py`` what they are worth, ``choice.py`` chooses, ``training.py`` trains, and
``handover.py`` writes the result.
"""

from shd_torch.compress.options import CompressOptions as CompressOptions
from shd_torch.compress.run import Compressed as Compressed
from shd_torch.compress.run import compress as compress
