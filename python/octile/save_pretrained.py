"""save_pretrained() of a Transformers model with quantized layers writes what save_checkpoint() writes.

Without this, it would write integers and no quantization_config, which from_pretrained() would take for a float model and load
as noise. The class is patched, not a model: the model that is saved may not be the one that was converted (only a part of it
was, or it is a copy).
"""

import functools
import inspect
import sys


def install():
    """If Transformers is loaded. Each quantized layer calls it when it is created, copied or unpickled."""
    transformers = sys.modules.get("transformers.modeling_utils")
    kind = getattr(transformers, "PreTrainedModel", None)  # None: it is just being imported
    if kind is None or hasattr(kind.save_pretrained, "octile"):
        return
    plain = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(self, save_directory, *arguments, **keywords):
        from .checkpoint_writer import save_checkpoint
        from .inference import _Inference

        quantized = any(isinstance(module, _Inference) for module in self.modules())
        # With adapters of Transformers' own, those alone are saved.
        if not quantized or getattr(self, "_hf_peft_config_loaded", False):
            return plain(self, save_directory, *arguments, **keywords)
        bound = inspect.signature(plain).bind(self, save_directory, *arguments, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        unknown = [n for n in ("state_dict", "push_to_hub", "variant", "distributed_checkpoint") if given.get(n)]
        if unknown:
            raise ValueError(
                f"octile: save_pretrained() of a quantized model cannot take {', '.join(unknown)}: "
                "octile.save_checkpoint(model, folder) writes the folder, huggingface_hub uploads one"
            )
        if given["is_main_process"]:
            save_checkpoint(self, save_directory, force=True, max_shard_size=given["max_shard_size"])
        return None

    save_pretrained.octile = True
    kind.save_pretrained = save_pretrained
