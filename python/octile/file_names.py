"""The names of tensors in the files of Transformers' models, where their modules have others (Mixtral's mlp is
block_sparse_moe there): those that Transformers reads and writes of float models."""

import sys


def conversions(model, **words):
    """Transformers' between the files of this model and its modules; None: it is no model of Transformers."""
    mapping = sys.modules.get("transformers.conversion_mapping")
    if not hasattr(mapping, "get_model_conversion_mapping") or not hasattr(model, "save_pretrained"):
        return None
    return mapping.get_model_conversion_mapping(model, **words)


def of_modules(model, names):
    """By these names of tensors in files those in the model."""
    known = conversions(model)
    return {name: name for name in names} if known is None else _renamed(names, known)


def of_files(model, names, layers):
    """By these names of tensors in the model those in files. A name stays where it would be read as that of another
    tensor, and the names of a layer of `layers` stay where they would become those of two."""
    known, alone = conversions(model), {name: name for name in names}
    if known is None:
        return alone
    used = getattr(model, "_weight_conversions", None)  # where Transformers has loaded it
    if used is None:
        used = [c for c in conversions(model, add_legacy=False) if type(c).__name__ != "PrefixChange"]
    found, stems = _renamed(names, [c.reverse_transform() for c in _renamings(used)[::-1]]), {}
    again = _renamed(found.values(), known)
    for name, new in found.items():
        parent, _, last = name.rpartition(".")
        stems.setdefault(parent, set()).add(new.removesuffix(f".{last}") if again[new] == name else parent)
    for name, new in found.items():
        parent = name.rpartition(".")[0]
        if again[new] != name or (parent in layers and len(stems[parent]) > 1):
            found[name] = name
    return found if len({*found.values()}) == len(found) else alone


def _renamings(conversions):
    from transformers.core_model_loading import WeightRenaming

    return [c for c in conversions if isinstance(c, WeightRenaming)]


def _renamed(names, conversions):
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings = _renamings(conversions)
    return {name: rename_source_key(name, renamings, [])[0] for name in sorted(names, key=dot_natural_key)}
