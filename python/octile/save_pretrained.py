"""save_pretrained() of a Transformers model with quantized layers writes what save_checkpoint() writes.

By itself it would write integers and no quantization_config, which from_pretrained() takes for a float model and loads as
noise. The mending is of the class: the model that is saved may not be the one that was converted (a part of it was, or it
is a copy), and knows nothing of its layers' kinds.
"""

import functools
import sys


def install():
    """Where Transformers is loaded. Each quantized layer asks for it as it is made, copied or unpickled."""
    transformers = sys.modules.get("transformers.modeling_utils")
    kind = getattr(transformers, "PreTrainedModel", None)  # None: it is just being imported
    if kind is None or hasattr(kind.save_pretrained, "octile"):
        return
    plain = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(self, save_directory, is_main_process=True, *arguments, **keywords):
        # With adapters of Transformers' own, those alone are saved.
        if getattr(self, "_hf_peft_config_loaded", False) or not is_quantized(self):
            return plain(self, save_directory, is_main_process, *arguments, **keywords)
        refused = ("state_dict", "push_to_hub", "variant", "distributed_checkpoint")
        given = [name for name in refused if keywords.get(name)]
        if arguments or given:
            raise ValueError(
                f"octile: save_pretrained() of a quantized model does not know {', '.join(given) or 'more arguments'}: "
                "octile.save_checkpoint(model, folder) writes the folder, huggingface_hub uploads one"
            )
        if is_main_process:
            save_checkpoint(self, save_directory, force=True)
        return None

    save_pretrained.octile = True
    kind.save_pretrained = save_pretrained


def is_quantized(model):
    from .inference import _Inference

    return any(isinstance(module, _Inference) for module in model.modules())


def save_checkpoint(*arguments, **keywords):
    from .checkpoint_writer import save_checkpoint

    return save_checkpoint(*arguments, **keywords)
