"""The packages of the extra ``report``, imported in one place: one that is missing is an error with the remedy."""

from shd_ref.errors import ShdError

try:
    import jinja2
    import matplotlib as mpl
    from markupsafe import Markup
    from matplotlib import image
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ShdError(
        "dependency-missing", f"shd report needs the package {error.name}: pip install 'squeezing-heads[report]'"
    ) from error

__all__ = ["Figure", "Markup", "MaxNLocator", "image", "jinja2", "mpl"]
