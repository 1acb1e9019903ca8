"""Writes bnb_nf4, bnb_fp4_nested, bnb_int8 (bitsandbytes by transformers, on the CPU) hqq_4bit, hqq_2bit (hqq), torchao_int8,
torchao_int4_g32 (torchao) and modelopt_int8_sq, modelopt_int4_awq (modelopt's packers) into the folder that is named, each with the values that its library reads."""
import hashlib, importlib.metadata, json, shutil, sys
from pathlib import Path
import bitsandbytes as bnb, torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
out = Path(sys.argv[1])
torch.manual_seed(11)
# 96 inputs: blocks of 64 cross rows.
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                     vocab_size=32, max_position_embeddings=128, dtype=torch.bfloat16)
base = LlamaForCausalLM(config).to(torch.bfloat16)
def write(folder, values, by):
    stored = load_file(folder / "model.safetensors")
    tensors = {}
    for name, value in sorted(values.items()):
        value = value.float().contiguous()
        assert value.isfinite().all()
        tensors[name] = {"f32_sha256": hashlib.sha256(value.numpy().tobytes()).hexdigest(), "first": value.flatten()[:4].tolist(),
                         "from": "cast" if stored.get(name) is not None and stored[name].is_floating_point() else "decoded",
                         "shape": list(value.shape)}
    json.dump({"bit_exact": True, "computed_by": by, "consumed_without_output": sorted(set(stored) - set(values)), "tensors": tensors},
              open(folder / "expected.json", "w"), indent=1, sort_keys=True)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", "expected.json"): path.unlink()
def bits_and_bytes(name, **how):
    folder = out / name
    base.save_pretrained(out / "base")
    model = AutoModelForCausalLM.from_pretrained(out / "base", quantization_config=BitsAndBytesConfig(**how), device_map="cpu", dtype=torch.bfloat16)
    if how.get("load_in_8bit"): model(torch.tensor([[1, 2]]))
    model.save_pretrained(folder)
    values = {key: value for key, value in model.state_dict().items() if value.is_floating_point() and not key.endswith((".SCB", "absmax", "quant_map"))}
    for key, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
            # Not the kernel for the CPU: where blocks cross rows it takes the wrong magnitudes.
            values[key + ".weight"] = _dequantize_4bit_compute(module.weight.data.reshape(-1), absmax, state.code, state.blocksize, state.shape, torch.float32)
            error = (values[key + ".weight"] - base.state_dict()[key + ".weight"].float()).norm() / base.state_dict()[key + ".weight"].float().norm()
            assert error < 0.15, error
        elif isinstance(module, bnb.nn.Linear8bitLt):
            scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            data = module.weight.data if module.weight.data.dtype == torch.int8 else module.state.CB
            values[key + ".weight"] = bnb.functional.int8_vectorwise_dequant(data, scb)
    write(folder, values, f"bitsandbytes {importlib.metadata.version('bitsandbytes')}, in float32")
def hqq(name, nbits, group_size, axis):
    folder = out / name
    folder.mkdir(exist_ok=True)
    stored, values = {}, {}
    for key, value in base.state_dict().items():
        values[key] = value
        if not ("proj" in key): stored[key] = value; continue
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False, dtype=torch.bfloat16)
        linear.weight.data = value.clone()
        layer = HQQLinear(linear, BaseQuantizeConfig(nbits=nbits, group_size=group_size, axis=axis), compute_dtype=torch.float16, device="cpu")
        for part, tensor in layer.state_dict().items(): stored[key.removesuffix("weight") + part] = tensor.contiguous()
        meta = dict(layer.meta, compute_dtype=torch.float32, scale=layer.meta["scale"].float(), zero=layer.meta["zero"].float())
        values[key] = Quantizer.dequantize(layer.W_q, meta)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads(base.config.to_json_string())
    described["quantization_config"] = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"weight_quant_params":
        {"nbits": nbits, "group_size": group_size, "axis": axis, "channel_wise": True, "optimize": True, "round_zero": nbits == 4, "view_as_float": False},
        "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}}
    json.dump(described, open(folder / "config.json", "w"), indent=1, sort_keys=True)
    write(folder, values, f"hqq {importlib.metadata.version('hqq') if 'hqq' in {d.name for d in importlib.metadata.distributions()} else '0.2.8.post1'} Quantizer.dequantize, in float32")
bits_and_bytes("bnb_nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
bits_and_bytes("bnb_fp4_nested", load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
bits_and_bytes("bnb_int8", load_in_8bit=True)
hqq("hqq_4bit", 4, 32, 1)
hqq("hqq_2bit", 2, 16, 0)
def described(name, description, convert, by):
    """`convert` gives the stored tensors and the values of one matrix."""
    folder = out / name
    folder.mkdir(exist_ok=True)
    stored, values = {}, {}
    for key, value in base.state_dict().items():
        stored[key] = values[key] = value
        if "proj" not in key: continue
        del stored[key]
        parts, values[key] = convert(key.removesuffix(".weight"), value.float())
        stored.update(parts)
    save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(base.config.to_json_string()) | {"quantization_config": description}
    json.dump(config, open(folder / "config.json", "w"), indent=1, sort_keys=True)
    write(folder, values, by)
def torchao(name, kind, how):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    def convert(module, value):
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
        linear.weight.data = value.clone()
        quantize_(linear, how)
        return flatten_tensor_state_dict({module + ".weight": linear.weight.data})[0], linear.weight.dequantize()
    described(name, {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}}, "modules_to_not_convert": ["lm_head"],
              "include_input_output_embeddings": False, "quant_type_kwargs": {}}, convert, "torchao 0.18.0, dequantize in float32")
def modelopt(name, algorithm, quantization, group_size):
    from modelopt.torch.export.quant_utils import to_quantized_weight
    def convert(module, value):
        before = (0.5 + torch.rand(value.shape[1])).float()
        smooth = value / before
        if group_size:
            scale = smooth.reshape(value.shape[0], -1, group_size).abs().amax(-1) / 7
            packed = to_quantized_weight(smooth, scale, quantization, block_size=group_size)
            nibbles = torch.stack([packed & 15, packed >> 4], 1).reshape(value.shape).to(torch.int8)
            values = torch.where(nibbles > 7, nibbles - 16, nibbles).float() * scale.repeat_interleave(group_size, -1)
        else:
            scale = smooth.abs().amax(-1) / 127
            packed = to_quantized_weight(smooth, scale, quantization)
            values = packed.float() * scale[:, None]
        parts = {module + ".weight": packed, module + ".weight_scale": scale}
        if "down" in module or "o_proj" in module:  # the others' are folded into the norms
            parts[module + ".pre_quant_scale"] = before
            values = values * before
        return parts, values
    more = {"group_size": group_size, "has_zero_point": False, "pre_quant_scale": True} if group_size else {}
    described(name, {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.47.0"}, **more},
              convert, "packed by nvidia-modelopt 0.47.0's to_quantized_weight; integer * scale * pre_quant_scale in float32")
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
torchao("torchao_int8", "Int8WeightOnlyConfig", Int8WeightOnlyConfig(version=2))
torchao("torchao_int4_g32", "IntxWeightOnlyConfig", IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
modelopt("modelopt_int8_sq", "W8A8_SQ_PER_CHANNEL", "int8_sq", None)
modelopt("modelopt_int4_awq", "W4A16_AWQ", "int4_awq", 32)
shutil.rmtree(out / "base")
