from typing import Any

from . import autograd as autograd, gluon as gluon

nd: Any
