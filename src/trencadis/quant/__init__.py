"""Quantized operands: low-precision values with scales, in several formats and granularities.

formats     the formats: the dtype of values, the dtype of scales, and the block that shares a scale
scaled      `Scaled`, the array that it stands for, and the order in which it is stored
blocks      scales of blocks: of each entry, and after axes are merged
operand     what a caller may pass as an operand of a product
calibrate   `quantize`: scales from the numbers of an array
checkpoints weights from the files of gpt-oss, AWQ, GPTQ and DeepSeek
qarray      qwix's quantized arrays as `Scaled`
prepare     weights stored once in the order in which products read them
recipe      which operands a layer quantizes during training
product     products of quantized operands
training    layers that quantize their operands, and their gradients
"""

from trencadis.quant.calibrate import quantize
from trencadis.quant.checkpoints import from_awq, from_fp8_blocks, from_gptq, from_mxfp4
from trencadis.quant.formats import FORMATS, Format
from trencadis.quant.prepare import prepare
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled, dequantize

__all__ = [
    "FORMATS",
    "Format",
    "Recipe",
    "Scaled",
    "dequantize",
    "from_awq",
    "from_fp8_blocks",
    "from_gptq",
    "from_mxfp4",
    "prepare",
    "quantize",
]
