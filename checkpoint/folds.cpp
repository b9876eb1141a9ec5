#include "folds.h"

namespace octile::checkpoint {

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> table = {
      {.model_types = {"llama", "mistral", "qwen2", "qwen3"},
       .blocks = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"},
       .folds = {{"input_layernorm", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
                 {"post_attention_layernorm", {"mlp.gate_proj", "mlp.up_proj"}},
                 // down's input is act(gate) * up: dividing up's outputs divides it.
                 {"mlp.up_proj", {"mlp.down_proj"}},
                 // Attention mixes tokens, never channels of one head.
                 {"self_attn.v_proj", {"self_attn.o_proj"}}}},
      {.model_types = {"bert", "roberta", "xlm-roberta", "electra"},
       .blocks = {"BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"},
       .folds = {{"attention.self.value", {"attention.output.dense"}}},
       .is_post_norm = true},
      {.model_types = {"distilbert", "mpnet"}, .is_post_norm = true},
      {.model_types = {"opt"},
       .blocks = {"OPTDecoderLayer"},
       .folds = {{"self_attn_layer_norm", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, true},
                 {"self_attn.v_proj", {"self_attn.out_proj"}},
                 {"final_layer_norm", {"fc1"}, true}}}};
  return table;
}

}  // namespace octile::checkpoint
