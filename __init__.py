"""Stands in for the package where Python takes a checkout named hf_hsdraft for it: in a script beside the checkout.

It is no part of the package. Without it such a script would find a folder without the package's names.
"""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("hf_hsdraft", Path(__file__).parent / "hf_hsdraft" / "__init__.py")
sys.modules[__name__] = _package = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)
