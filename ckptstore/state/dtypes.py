"""What is a dtype called, how wide is it, and what do safetensors call it?

One table, free of torch, so that a container can be planned and checked where torch isn't installed. Names are torch's
without the prefix. A dtype that the safetensors format has no code for is stored as that many U8; what it truly is
stands in the manifest.
"""

from __future__ import annotations

__all__ = ["CODES", "ITEM_BYTES", "NAMES_BY_CODE"]

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that can be stored, with the bytes of one element."""

CODES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""The codes whose elements are whole bytes, as safetensors 0.8 reads them. Its F4 counts half bytes in the shape and
torch's float4_e2m1fn_x2 counts pairs, so that one is stored as U8 like the dtypes without a code."""

NAMES_BY_CODE: dict[str, str] = {code: name for name, code in CODES.items()}
