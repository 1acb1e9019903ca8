//! Packed integers: compressed-tensors, GPTQ, AWQ.

use super::{Inventory, StoredError, expected, nvfp4, wrong};
use crate::{
    container::TensorInfo,
    stored::{
        Logical,
        awq::Awq,
        config::{self, CompressedTensors, Kind, PerModule, Strategy, Weights},
        elements::is_scale,
        fp4::{BlockScale, Fp4, Second},
        gptq::Gptq,
        packed::Packed,
    },
};
use shardpack_quantize::dtype::Dtype;

fn matrix(tensor: &TensorInfo, dtype: Dtype) -> Result<[u64; 2], StoredError> {
    match tensor.shape.as_slice() {
        [rows, columns] if tensor.dtype == dtype && *rows > 0 && *columns > 0 => {
            Ok([*rows, *columns])
        }
        _ => Err(expected(tensor, &format!("{dtype} with two dimensions"))),
    }
}

/// Checks that a tensor has this type and shape.
fn check(tensor: &TensorInfo, dtype: Dtype, shape: &[u64]) -> Result<(), StoredError> {
    if tensor.dtype == dtype && tensor.shape == shape {
        return Ok(());
    }
    Err(expected(tensor, &format!("{dtype} {shape:?}")))
}

fn check_scale(tensor: &TensorInfo, shape: &[u64]) -> Result<(), StoredError> {
    if is_scale(tensor.dtype) && tensor.dtype.is_float() && tensor.shape == shape {
        return Ok(());
    }
    Err(expected(tensor, &format!("floats {shape:?}")))
}

fn too_large(tensor: &TensorInfo) -> StoredError {
    expected(tensor, "fewer columns")
}

impl Inventory<'_> {
    pub(super) fn compressed(&mut self, config: &CompressedTensors) -> Result<(), StoredError> {
        for module in self.stems(".weight_packed") {
            let name = format!("{module}.weight");
            let weights = config.of(&module).map_err(|problem| wrong(&name, problem))?;
            match weights.kind {
                Kind::PackQuantized => self.pack_quantized(&name, weights)?,
                Kind::Nvfp4 | Kind::Mxfp4 => self.compressed_fp4(name, weights)?,
                Kind::IntQuantized | Kind::FloatQuantized => {
                    let problem = "quantization_config says that it is not packed, but there is weight_packed";
                    return Err(wrong(&name, problem));
                }
            }
        }
        for module in self.stems(".weight_scale") {
            let name = format!("{module}.weight");
            let scale = self.need(&format!("{name}_scale"), &name)?;
            let weight = self.need(&name, &scale.name)?;
            let weights = config.of(&module).map_err(|problem| wrong(&name, problem))?;
            let (format, dtype) = match weights.kind {
                Kind::IntQuantized => ("compressed-tensors INT8", Dtype::I8),
                Kind::FloatQuantized => ("compressed-tensors FP8", Dtype::F8E4M3),
                Kind::PackQuantized | Kind::Nvfp4 | Kind::Mxfp4 => {
                    let problem =
                        "quantization_config says that it is packed, but there is no weight_packed";
                    return Err(wrong(&name, problem));
                }
            };
            if weight.dtype != dtype {
                return Err(expected(weight, dtype.name()));
            }
            let zero = self.take(&format!("{name}_zero_point"));
            if zero.is_some() == weights.symmetric {
                let problem = "quantization_config and the presence of weight_zero_point disagree";
                return Err(wrong(&name, problem));
            }
            let block = match weights.strategy {
                Strategy::Block(block) => Some(block),
                Strategy::Group(size) => Some([1, size]),
                Strategy::Tensor | Strategy::Channel => None,
            };
            self.add_scaled(format, weight, scale, zero, block, None)?;
        }
        Ok(())
    }

    fn pack_quantized(&mut self, name: &str, weights: Weights) -> Result<(), StoredError> {
        let packed = self.need(&format!("{name}_packed"), name)?;
        let scale = self.need(&format!("{name}_scale"), name)?;
        let shape = self.need(&format!("{name}_shape"), name)?;
        let zero = self.take(&format!("{name}_zero_point"));
        let [height, words] = matrix(packed, Dtype::I32)?;
        let per_word = u64::from(32 / weights.bits);
        let width = words.checked_mul(per_word).ok_or_else(|| too_large(packed))?;
        let group_size = match weights.strategy {
            Strategy::Group(size) => size,
            Strategy::Channel => width,
            Strategy::Tensor | Strategy::Block(_) => {
                return Err(wrong(name, "packed integers have a scale for each row or group"));
            }
        };
        if !matches!(shape.dtype, Dtype::I32 | Dtype::I64) || shape.shape != [2] {
            return Err(expected(shape, "I64 [2]"));
        }
        if !width.is_multiple_of(group_size) {
            return Err(expected(packed, &format!("whole groups of {group_size} columns")));
        }
        let groups = width / group_size;
        check_scale(scale, &[height, groups])?;
        if zero.is_some() == weights.symmetric {
            let problem = "quantization_config and the presence of weight_zero_point disagree";
            return Err(wrong(name, problem));
        }
        if let Some(zero) = zero {
            check(zero, Dtype::I32, &[height.div_ceil(per_word), groups])?;
        }
        let layout = Packed {
            bits: weights.bits,
            height,
            width,
            group_size,
            scale: scale.dtype,
            shape: shape.dtype,
            has_zero: zero.is_some(),
        };
        let parts = [Some(packed), Some(scale), Some(shape), zero];
        let parts = parts.into_iter().flatten().map(|part| part.name.clone()).collect();
        let format = format!("compressed-tensors INT{}, groups of {group_size}", weights.bits);
        self.add(name, [height, width], scale.dtype, format, parts, layout);
        Ok(())
    }

    fn add(
        &mut self,
        name: &str,
        shape: [u64; 2],
        native: Dtype,
        format: String,
        parts: Vec<String>,
        layout: impl crate::stored::Layout + 'static,
    ) {
        let name = name.to_owned();
        let logical = Logical::decoded(name, shape.to_vec(), native, format, parts, layout);
        self.grouped.tensors.push(logical);
    }

    fn compressed_fp4(&mut self, name: String, weights: Weights) -> Result<(), StoredError> {
        let values = self.need(&format!("{name}_packed"), &name)?;
        let scale = self.need(&format!("{name}_scale"), &name)?;
        let leading = &values.shape[..values.shape.len().saturating_sub(1)];
        let nv = nvfp4(values, Second::Divides)?;
        let (layout, second, format) = if weights.kind == Kind::Nvfp4 {
            let second = self.need(&format!("{name}_global_scale"), &name)?;
            (nv, Some(second), "compressed-tensors NVFP4")
        } else {
            let (scale, second) = (BlockScale::E8M0, Second::None);
            let layout = Fp4 { group_size: 32, scale, second, ..nv };
            (layout, None, "compressed-tensors MXFP4")
        };
        if !matches!(weights.strategy, Strategy::Group(size) if size == layout.group_size) {
            return Err(wrong(&name, format!("its format has groups of {}", layout.group_size)));
        }
        self.add_fp4(format, name, (values, scale, second), layout, leading)
    }

    pub(super) fn gptq(&mut self, config: &PerModule<config::Gptq>) -> Result<(), StoredError> {
        for module in self.stems(".qweight") {
            let config = *config.of(&module);
            let per_word = u64::from(32 / config.bits);
            let name = format!("{module}.weight");
            let weight = self.need(&format!("{module}.qweight"), &name)?;
            let zeros = self.need(&format!("{module}.qzeros"), &name)?;
            let scales = self.need(&format!("{module}.scales"), &name)?;
            let index = self.take(&format!("{module}.g_idx"));
            let [words, height] = matrix(weight, Dtype::I32)?;
            let width = words.checked_mul(per_word).ok_or_else(|| too_large(weight))?;
            let group_size = config.group_size.unwrap_or(width).min(width);
            let groups = width.div_ceil(group_size);
            check_scale(scales, &[groups, height])?;
            check(zeros, Dtype::I32, &[groups, height.div_ceil(per_word)])?;
            if let Some(index) = index {
                check(index, Dtype::I32, &[width])?;
            }
            let layout = Gptq {
                bits: config.bits,
                height,
                width,
                group_size,
                groups,
                scale: scales.dtype,
                zero_offset: u32::from(!config.is_v2),
                has_index: index.is_some(),
            };
            let parts = [Some(weight), Some(zeros), Some(scales), index];
            let parts = parts.into_iter().flatten().map(|part| part.name.clone()).collect();
            let version = if config.is_v2 { "GPTQ v2" } else { "GPTQ" };
            let format = format!("{version}, {} bits in groups of {group_size}", config.bits);
            self.add(&name, [height, width], scales.dtype, format, parts, layout);
        }
        Ok(())
    }

    pub(super) fn awq(&mut self, config: &PerModule<config::Awq>) -> Result<(), StoredError> {
        for module in self.stems(".qweight") {
            let group_size = config.of(&module).group_size;
            let name = format!("{module}.weight");
            let weight = self.need(&format!("{module}.qweight"), &name)?;
            let zeros = self.need(&format!("{module}.qzeros"), &name)?;
            let scales = self.need(&format!("{module}.scales"), &name)?;
            let [width, words] = matrix(weight, Dtype::I32)?;
            let height = words.checked_mul(8).ok_or_else(|| too_large(weight))?;
            let group_size = group_size.unwrap_or(width);
            if !width.is_multiple_of(group_size) {
                return Err(expected(weight, &format!("whole groups of {group_size} rows")));
            }
            check_scale(scales, &[width / group_size, height])?;
            check(zeros, Dtype::I32, &[width / group_size, words])?;
            let layout = Awq { height, width, group_size, scale: scales.dtype };
            let parts = [weight, zeros, scales].map(|part| part.name.clone()).to_vec();
            let format = format!("AWQ, 4 bits in groups of {group_size}");
            self.add(&name, [height, width], scales.dtype, format, parts, layout);
        }
        Ok(())
    }
}
