"""Which dense tensors make up a sparse one, and how is it put together again?

A sparse tensor is stored as its index and value tensors, as they are: an uncoalesced one stays uncoalesced, index
dtypes and explicit zeros stay. It is put together with torch's own check of the invariants, since a kernel trusts
indices blindly; the same check runs before saving, so what was accepted can be loaded.
"""

from __future__ import annotations

import warnings

import torch

from ckptstore.state._leaves import RefusedError

LAYOUTS: dict[str, torch.layout] = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}
LAYOUT_NAMES = {layout: name for name, layout in LAYOUTS.items()}
PARTS = {
    "coo": ("indices", "values"),
    "csr": ("crow_indices", "col_indices", "values"),
    "csc": ("ccol_indices", "row_indices", "values"),
    "bsr": ("crow_indices", "col_indices", "values"),
    "bsc": ("ccol_indices", "row_indices", "values"),
}


def take_apart(tensor: torch.Tensor) -> tuple[str, dict[str, torch.Tensor]]:
    """The name of the layout and the dense parts by name, sharing the tensor's memory; RefusedError if invalid."""
    layout = LAYOUT_NAMES[tensor.layout]
    tensor = tensor.detach()
    if layout == "coo":
        parts = {"indices": tensor._indices(), "values": tensor._values()}  # noqa: SLF001  # the public ones coalesce
    else:
        parts = {name: getattr(tensor, name)() for name in PARTS[layout]}
    try:
        put_together(layout, parts, tuple(tensor.shape), coalesced=tensor.is_coalesced() if layout == "coo" else None)
    except RuntimeError as error:
        what = f"a sparse {layout} tensor whose indices break the layout's rules ({str(error).partition(chr(10))[0]})"
        remedy = "build it with check_invariants=True to see where it goes wrong"
        raise RefusedError(what, remedy) from None
    return layout, parts


def put_together(
    layout: str, parts: dict[str, torch.Tensor], shape: tuple[int, ...], *, coalesced: bool | None
) -> torch.Tensor:
    """The sparse tensor over *parts*, sharing their memory; RuntimeError when they don't fit together."""
    check = not parts["values"].is_meta  # a stand-in has no indices to look at
    if layout == "coo":
        indices, values = parts["indices"], parts["values"]
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=check)
    compressed, plain, values = (parts[name] for name in PARTS[layout])
    with warnings.catch_warnings():  # torch's own notice, once per process, that CSR and its kin are in beta
        warnings.filterwarnings("ignore", message="Sparse .* in beta", category=UserWarning)
        return torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=LAYOUTS[layout], check_invariants=check
        )
