"""What an operation does, whatever its framework calls it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final, Literal

from .probe import Reading, Stats

Family = Literal[
    "cast",
    "decomposition",
    "division",
    "exponential",
    "logarithm",
    "loss",
    "mask",
    "matmul",
    "move",
    "norm",
    "root",
    "sum",
    "other",
]

# Names as `normalised` leaves them, of PyTorch, TensorFlow, Keras, MXNet, PaddlePaddle and JAX.
_FAMILIES: Final[dict[Family, str]] = {
    "cast": "tocopy to cast ampcast convertelementtype astype copy",
    "decomposition": "cholesky choleskyex linalgcholesky linalgcholeskyex potrf lu lufactor linalglufactor "
    "linalglufactorex linalglu linalgsolve linalgsolveex solve matrixsolve linalginv linalginvex matrixinverse inverse "
    "eigh linalgeigh selfadjointeig logdet slogdet linalgslogdet",
    "division": "div divide truedivide realdiv divnonan xdivy rdiv reciprocal rsqrt rcbrt rcp inv",
    "exponential": "exp expm1 exp2 pow power integerpow rpower square cosh sinh logsumexp softplus",
    "logarithm": "log log2 log10 log1p logit xlogy logsigmoid atanh arctanh erfinv",
    "loss": "nllloss nllloss2d nllloss2dforward nlllossforward crossentropy crossentropyloss crossentropywithsoftmax "
    "softmaxwithcrossentropy softmaxcrossentropywithlogits sparsesoftmaxcrossentropywithlogits softmaxcrossentropy "
    "binarycrossentropy binarycrossentropywithlogits bceloss mseloss l1loss smoothl1loss huberloss kldiv kldivloss "
    "ctcloss l2loss softmaxoutput sigmoidcrossentropywithlogits pickloss",
    "mask": "maskedfill where select selectn selectv2 fill full fulllike scalartensor constant triu tril",
    "matmul": "mm addmm bmm baddbmm matmul linear dot dotgeneral batchdot batchmatmul einsum fullyconnected dense "
    "convolution conv1d conv2d conv3d convgeneraldilated conv mkldnnconvolution convolutionoverrideable "
    "scaleddotproductattention scaleddotproductflashattentionforcpu deconvolution inner tensordot addmv mv "
    "mkldnnlinear",
    "move": "view unsafeview reshape squeeze unsqueeze expanddims transpose permute t swapaxes slice stridedslice "
    "dynamicslice split unbind concat cat concatenate concatv2 stack pack unpack flatten detach alias clone identity "
    "expand indim slicechannel reshape2 squeeze2 unsqueeze2 transpose2 tile pad flip rev stopgradient blockgrad "
    "contiguous asstrided getitem",
    "norm": "layernorm nativelayernorm batchnorm nativebatchnorm cudnnbatchnorm groupnorm nativegroupnorm instancenorm "
    "rmsnorm fusedrmsnorm fusedbatchnorm nativebatchnormlegit l2normalize l2normalization normalize batchnormex "
    "syncbatchnorm lrn",
    "root": "sqrt cbrt acosh arccosh asin arcsin acos arccos norm linalgvectornorm linalgnorm vectornorm pnorm "
    "euclideannorm",
    "sum": "sum mean cumsum nansum var varmean std stdmean prod cumprod windowsum segmentsum "
    "avgpool2d adaptiveavgpool2d avgpool squaresum",
}
# Where a function or its derivative is infinite; where it is not named here, at 0.
_POLES: Final[dict[str, tuple[float, ...]]] = {
    "log1p": (-1.0,),
    **dict.fromkeys(("atanh", "arctanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("logit", "specialogit"), (0.0, 1.0)),
    **dict.fromkeys(("acosh", "arccosh"), (1.0,)),
    **dict.fromkeys(("asin", "arcsin", "acos", "arccos"), (-1.0, 1.0)),
}
_PREFIXES: Final = re.compile(
    r"^_*(backward_+)?(npi_|npx_|np_|contrib_|broadcast_|elemwise_|elementwise_|reduce_|fused_|unsafe_)?"
)
_SUFFIXES: Final = re.compile(r"(_scalar|_backward|_grad|_v\d|v\d|_op)+$")


@functools.cache
def normalised(name: str) -> str:
    """Return the name of an operation without what frameworks put around it: prefixes, case, versions."""
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition("::")[2].partition(".")[0]).lower()
    return _SUFFIXES.sub("", _PREFIXES.sub("", word)).replace("_", "")


@functools.cache
def family(name: str) -> Family:
    """Return what an operation does; `"other"` where the table does not have it."""
    word = normalised(name)
    return next((kind for kind, words in _FAMILIES.items() if word in words.split()), "other")


def poles_of(name: str) -> tuple[float, ...]:
    """Return the numbers at which an operation, or its derivative, is infinite, if it is anywhere."""
    return _POLES.get(normalised(name), (0.0,))


def reaches(inputs: Stats, pole: float, exact: Stats | None) -> bool:
    """Return whether what an operation received comes up to a pole, and in float32 does not, as far as is known."""
    if not pole:
        return inputs.zeros > (0 if exact is None else exact.zeros)
    end = "largest" if pole > 0 else "lowest"
    return bool(getattr(inputs, end) == pole and (exact is None or getattr(exact, end) != pole))


def failing(readings: Iterable[Reading]) -> tuple[str, ...]:
    """Return the operations of the forward pass that make what is not finite of what is finite."""
    names = [
        entry.operation
        for entry in readings
        if entry.operation and entry.value.nonfinite and not entry.inputs.nonfinite
        if entry.direction == "forward" and family(entry.operation) != "cast"
    ]
    return tuple(dict.fromkeys(names))
