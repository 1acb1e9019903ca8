//! Which stored tensors make up which logical one. Every stored tensor is taken once, dropped
//! with a reason, or left as a tensor of its own name; every shape is checked against the others.

pub(super) mod described;
mod integers;
mod modelopt;
mod scales;

use std::collections::BTreeMap;

use super::{
    Descriptions, Logical, StoredConfig, StoredError,
    config::{Method, MlxFormat, MlxMode},
    elements::is_scale,
    fp4::{BlockScale, Fp4, Second},
    mlx::MlxAffine,
    scaled::{Element, Scaled},
    whole,
};
use crate::container::TensorInfo;
use shardpack_quantize::dtype::Dtype;

/// A checkpoint's tensors.
#[derive(Clone, Debug, Default)]
pub struct Grouped {
    /// Float tensors, and what no format knows.
    pub tensors: Vec<Logical>,
    /// Stored tensors that no weight needs, with the reason.
    pub dropped: Vec<(String, &'static str)>,
}

/// Endings of what is kept beside quantized weights for running them in fewer bits.
const RUN_TIME: &[&str] = &[
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".input_scale_inv",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".prob_scale",
];

/// Why these are dropped.
const ACTIVATIONS: &str = "a scale of activations or of the cache, not of weights";

/// The tensors that are still to be taken.
struct Inventory<'a> {
    left: BTreeMap<&'a str, &'a TensorInfo>,
    descriptions: &'a Descriptions,
    grouped: Grouped,
}

/// Puts stored tensors together. Without a description all are taken as they are. `descriptions`
/// holds the tensors of which [`StoredConfig::is_description`] says so.
pub fn group(
    config: Option<&StoredConfig>,
    tensors: &[TensorInfo],
    descriptions: &Descriptions,
) -> Result<Grouped, StoredError> {
    tensors.iter().try_for_each(check_size)?;
    let left = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut inventory = Inventory { left, descriptions, grouped: Grouped::default() };
    match config.map(|config| &config.0) {
        None => {}
        Some(Method::Fp8 { block }) => inventory.fp8(*block)?,
        Some(Method::CompressedTensors(config)) => inventory.compressed(config)?,
        Some(Method::Gptq(config)) => inventory.gptq(config)?,
        Some(Method::Awq(config)) => inventory.awq(config)?,
        Some(Method::Mxfp4) => inventory.mxfp4()?,
        Some(Method::ModelOpt) => inventory.modelopt()?,
        Some(Method::Mlx(config)) => inventory.mlx(config)?,
        Some(Method::BitsAndBytes) => inventory.bitsandbytes()?,
        Some(Method::Hqq) => inventory.hqq()?,
        Some(Method::TorchAo) => inventory.torchao()?,
    }
    if config.is_some_and(|config| !matches!(config.0, Method::Mlx(_))) {
        inventory.drop_run_time();
    }
    let plain = inventory.left.values().map(|tensor| match whole::table(tensor) {
        Some(table) => table,
        None => Logical::plain(tensor.name.clone(), tensor.dtype, tensor.shape.clone()),
    });
    let plain: Vec<Logical> = plain.collect();
    inventory.grouped.tensors.extend(plain);
    inventory.grouped.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    inventory.grouped.check_names()?;
    Ok(inventory.grouped)
}

/// Endings of what stands beside quantized weights, though it may be floats itself.
const COMPANIONS: &[&str] = &[
    ".SCB",
    ".absmax",
    ".quant_map",
    ".qzeros",
    ".scale",
    ".scales",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".zero",
    ".zero_point",
    "_scales",
];

/// Whether a checkpoint holds nothing but plain floats, whatever its description says: tools leave
/// the description of a quantized base behind when they save merged weights.
#[must_use]
pub fn are_plain<'a>(mut tensors: impl Iterator<Item = &'a TensorInfo>) -> bool {
    let is_float = |tensor: &TensorInfo| {
        matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
            || whole::table(tensor).is_some()
    };
    tensors.all(|tensor| {
        is_float(tensor) && !COMPANIONS.iter().any(|ending| tensor.name.ends_with(ending))
    })
}

impl Grouped {
    /// Whether every name stands for one tensor; they are sorted.
    pub(super) fn check_names(&self) -> Result<(), StoredError> {
        for pair in self.tensors.windows(2) {
            if pair[0].name == pair[1].name {
                return Err(wrong(&pair[0].name, "it is stored in two ways"));
            }
        }
        Ok(())
    }
}

fn wrong(tensor: &str, problem: impl Into<String>) -> StoredError {
    StoredError::Tensor { tensor: tensor.to_owned(), problem: problem.into() }
}

/// Most elements of a tensor, empty dimensions counted as one: any product of some of its
/// dimensions, of two nibbles for a byte or eight bytes for an element stays below 2^64.
const MAX_ELEMENTS: u64 = 1 << 56;

/// Whether a shape's products can be formed, in any order. Below this gate they are not checked
/// again. Files hold no such tensor, but an empty one may claim it (`[0, 2^40, 2^40]`).
fn check_size(tensor: &TensorInfo) -> Result<(), StoredError> {
    let product = |all: u64, dim: &u64| all.checked_mul((*dim).max(1));
    let elements = tensor.shape.iter().try_fold(1, product);
    if elements.is_some_and(|elements| elements <= MAX_ELEMENTS) {
        return Ok(());
    }
    Err(wrong(&tensor.name, format!("its shape {:?} is beyond any file", tensor.shape)))
}

/// The error of a tensor with another type or shape than those of its weight ask for.
fn expected(tensor: &TensorInfo, expected: &str) -> StoredError {
    let found = format!("it is {} {:?}, expected {expected}", tensor.dtype, tensor.shape);
    wrong(&tensor.name, found)
}

impl<'a> Inventory<'a> {
    /// Names that end so and are still there, without the ending.
    fn stems(&self, ending: &str) -> Vec<String> {
        let stem = |name: &&str| name.strip_suffix(ending).map(str::to_owned);
        self.left.keys().filter_map(stem).collect()
    }

    fn take(&mut self, name: &str) -> Option<&'a TensorInfo> {
        self.left.remove(name)
    }

    /// Takes a tensor that must be there, for `whom`.
    fn need(&mut self, name: &str, whom: &str) -> Result<&'a TensorInfo, StoredError> {
        let missing = || wrong(whom, format!("it needs {name:?}, which is missing"));
        self.take(name).ok_or_else(missing)
    }

    fn drop_run_time(&mut self) {
        for ending in RUN_TIME {
            for stem in self.stems(ending) {
                let name = format!("{stem}{ending}");
                self.left.remove(name.as_str());
                self.grouped.dropped.push((name, ACTIVATIONS));
            }
        }
        self.grouped.dropped.sort_unstable();
    }

    fn fp8(&mut self, block: Option<[u64; 2]>) -> Result<(), StoredError> {
        let names: Vec<&str> = self.left.values().filter(|t| is_fp8(t)).map(|t| &*t.name).collect();
        for name in names {
            let weight = self.need(name, name)?;
            let scale = self
                .take(&format!("{name}_scale_inv"))
                .or_else(|| self.take(&format!("{name}_scale")))
                .or_else(|| self.take(&format!("{}.scale", name.strip_suffix(".weight")?)));
            let scale = scale.ok_or_else(|| {
                wrong(name, format!("it is {} without {name}_scale_inv", weight.dtype))
            })?;
            self.add_scaled("FP8", weight, scale, None, block, None)?;
        }
        self.fp4_beside_fp8()
    }

    /// DeepSeek V4: experts `X.weight` `[…, out, in / 2]` of four-bit floats with `X.scale`
    /// `[…, out, in / 32]` beside other matrices in FP8.
    fn fp4_beside_fp8(&mut self) -> Result<(), StoredError> {
        for stem in self.stems(".scale") {
            let name = format!("{stem}.weight");
            let is_packed = |it: &&TensorInfo| matches!(it.dtype, Dtype::I8 | Dtype::U8);
            let Some(weight) = self.left.get(name.as_str()).copied().filter(is_packed) else {
                continue;
            };
            let scale = self.need(&format!("{stem}.scale"), &name)?;
            self.take(&name);
            let [leading @ .., bytes] = weight.shape.as_slice() else {
                return Err(expected(weight, "a matrix"));
            };
            let (group_size, second) = (32, Second::None);
            let layout = Fp4 { width: 2 * bytes, group_size, scale: BlockScale::E8M0, second };
            self.add_fp4("FP4", name, (weight, scale, None), layout, leading)?;
        }
        Ok(())
    }

    /// Adds a tensor of bytes with scales.
    fn add_scaled(
        &mut self,
        format: &str,
        weight: &TensorInfo,
        scale: &TensorInfo,
        zero: Option<&TensorInfo>,
        block: Option<[u64; 2]>,
        name: Option<String>,
    ) -> Result<(), StoredError> {
        let element = match weight.dtype {
            Dtype::F8E4M3 => Element::E4M3,
            Dtype::I8 => Element::I8,
            _ => return Err(expected(weight, "F8_E4M3 or I8")),
        };
        if !is_scale(scale.dtype) {
            return Err(expected(scale, "a scale in F32, BF16, F16 or F8_E8M0"));
        }
        let shares = scales::shares(weight, scale, block)?;
        if let Some(zero) = zero
            && (zero.dtype != Dtype::I8 || zero.shape != scale.shape || element != Element::I8)
        {
            return Err(expected(zero, &format!("I8 {:?}", scale.shape)));
        }
        let layout = Scaled {
            element,
            scale: scale.dtype,
            height: shares.height,
            width: shares.width,
            block_rows: shares.rows,
            block_columns: shares.columns,
            has_zero: zero.is_some(),
        };
        let mut parts = vec![weight.name.clone(), scale.name.clone()];
        parts.extend(zero.map(|zero| zero.name.clone()));
        let format = format!("{format}, {}", shares.words);
        let name = name.unwrap_or_else(|| weight.name.clone());
        let logical =
            Logical::decoded(name, weight.shape.clone(), scale.dtype, format, parts, layout);
        self.grouped.tensors.push(logical);
        Ok(())
    }

    /// Adds a tensor of four-bit floats: `values` has two in each byte.
    fn add_fp4(
        &mut self,
        format: &str,
        name: String,
        (values, scale, second): (&TensorInfo, &TensorInfo, Option<&TensorInfo>),
        layout: Fp4,
        leading: &[u64],
    ) -> Result<(), StoredError> {
        let rows: u64 = leading.iter().product();
        let bytes = values.size;
        if bytes != rows * (layout.width / 2) || !layout.width.is_multiple_of(layout.group_size) {
            let groups = layout.group_size;
            return Err(expected(values, &format!("whole groups of {groups} columns")));
        }
        let one_byte = scale.size == rows * (layout.width / layout.group_size);
        let right = match layout.scale {
            BlockScale::E8M0 => matches!(scale.dtype, Dtype::U8 | Dtype::F8E8M0),
            BlockScale::E4M3 => matches!(scale.dtype, Dtype::U8 | Dtype::F8E4M3),
        };
        if !one_byte || !right {
            let groups = layout.width / layout.group_size;
            return Err(expected(
                scale,
                &format!("a byte for each of {rows} rows of {groups} groups"),
            ));
        }
        if let Some(second) = second
            && (second.dtype != Dtype::F32 || second.size != 4)
        {
            return Err(expected(second, "one F32 number"));
        }
        let mut shape = leading.to_vec();
        shape.push(layout.width);
        let parts = [Some(values), Some(scale), second];
        let parts = parts.into_iter().flatten().map(|part| part.name.clone()).collect();
        let format = format.to_owned();
        let logical = Logical::decoded(name, shape, Dtype::BF16, format, parts, layout);
        self.grouped.tensors.push(logical);
        Ok(())
    }

    /// gpt-oss: `X_blocks` `[…, rows, groups, 16]` and `X_scales` `[…, rows, groups]`. What they
    /// stand for is `X.weight` `[…, rows, in]`; the rows of gate and up are told apart.
    fn mxfp4(&mut self) -> Result<(), StoredError> {
        for stem in self.stems("_blocks") {
            let blocks = self.need(&format!("{stem}_blocks"), &stem)?;
            let scales = self.need(&format!("{stem}_scales"), &blocks.name)?;
            let [leading @ .., groups, 16] = blocks.shape.as_slice() else {
                return Err(expected(blocks, "[…, rows, groups, 16]"));
            };
            if blocks.dtype != Dtype::U8 {
                return Err(expected(blocks, "U8"));
            }
            let width = groups.checked_mul(32).ok_or_else(|| expected(blocks, "fewer groups"))?;
            let (scale, second) = (BlockScale::E8M0, Second::None);
            let layout = Fp4 { width, group_size: 32, scale, second };
            let parts = (blocks, scales, None);
            let Some(experts) = stem.strip_suffix("gate_up_proj") else {
                self.add_fp4("MXFP4", format!("{stem}.weight"), parts, layout, leading)?;
                continue;
            };
            // Even rows are of the gate, odd ones of the other half.
            for (first, part) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let name = format!("{experts}{part}.weight");
                self.add_fp4("MXFP4", name, parts, layout.clone(), leading)?;
                let added = self.grouped.tensors.last_mut().expect("it was just added");
                added.every(first as u64, 2).map_err(|problem| wrong(&blocks.name, problem))?;
            }
        }
        Ok(())
    }

    fn mlx(&mut self, config: &super::config::Mlx) -> Result<(), StoredError> {
        for stem in self.stems(".scales") {
            let format = config.overrides.get(&stem).copied().unwrap_or(Some(config.main));
            let Some(format) = format else {
                return Err(wrong(
                    &stem,
                    "it has scales, but the config says that it is not quantized",
                ));
            };
            self.mlx_matrix(&stem, format)?;
        }
        Ok(())
    }

    fn mlx_matrix(&mut self, stem: &str, format: MlxFormat) -> Result<(), StoredError> {
        let name = format!("{stem}.weight");
        let scales = self.need(&format!("{stem}.scales"), &name)?;
        let weight = self.need(&name, &scales.name)?;
        let [leading @ .., words] = weight.shape.as_slice() else {
            return Err(expected(weight, "a matrix"));
        };
        let (bits, group_size) = (u64::from(format.bits), format.group_size);
        if weight.dtype != Dtype::U32 {
            return Err(expected(weight, "U32"));
        }
        let width = words.checked_mul(32).map_or(0, |total| total / bits);
        let mut wanted = leading.to_vec();
        wanted.push(width / group_size);
        if width == 0
            || width * bits != words * 32
            || !width.is_multiple_of(group_size)
            || scales.shape != wanted
        {
            let wanted = format!("{bits} bits in groups of {group_size}, with scales {wanted:?}");
            return Err(expected(weight, &wanted));
        }
        let (one, two) = (Second::None, BlockScale::E4M3);
        match format.mode {
            MlxMode::Affine => {
                let biases = self.need(&format!("{stem}.biases"), &name)?;
                if !scales.dtype.is_float()
                    || (biases.dtype, &biases.shape) != (scales.dtype, &wanted)
                {
                    return Err(expected(biases, &format!("the same as {}", scales.name)));
                }
                let mut shape = leading.to_vec();
                shape.push(width);
                let parts = [weight, scales, biases].map(|part| part.name.clone()).to_vec();
                let words = format!("MLX affine, {bits} bits in groups of {group_size}");
                let scale = scales.dtype;
                let layout = MlxAffine { bits: format.bits, width, group_size, scale };
                let logical = Logical::decoded(name, shape, scale, words, parts, layout);
                self.grouped.tensors.push(logical);
                Ok(())
            }
            MlxMode::Mxfp4 => {
                let layout = Fp4 { width, group_size, scale: BlockScale::E8M0, second: one };
                self.add_fp4("MLX MXFP4", name, (weight, scales, None), layout, leading)
            }
            MlxMode::Nvfp4 => {
                let layout = Fp4 { width, group_size, scale: two, second: one };
                self.add_fp4("MLX NVFP4", name, (weight, scales, None), layout, leading)
            }
            MlxMode::Mxfp8 => {
                if scales.dtype != Dtype::U8 {
                    return Err(expected(scales, "U8"));
                }
                let mut shape = leading.to_vec();
                shape.push(width);
                let layout = Scaled {
                    element: Element::E4M3,
                    scale: Dtype::F8E8M0,
                    height: leading.iter().product::<u64>().max(1),
                    width,
                    block_rows: 1,
                    block_columns: group_size,
                    has_zero: false,
                };
                let parts = vec![weight.name.clone(), scales.name.clone()];
                let words = "MLX MXFP8".to_owned();
                let logical = Logical::decoded(name, shape, Dtype::BF16, words, parts, layout);
                self.grouped.tensors.push(logical);
                Ok(())
            }
        }
    }
}

/// The layout of NVFP4 for bytes `[…, in / 2]`.
fn nvfp4(values: &TensorInfo, second: Second) -> Result<Fp4, StoredError> {
    match values.shape.last() {
        Some(bytes) if values.dtype == Dtype::U8 && *bytes <= u64::MAX / 2 => {
            Ok(Fp4 { width: 2 * bytes, group_size: 16, scale: BlockScale::E4M3, second })
        }
        _ => Err(expected(values, "U8 […, in / 2]")),
    }
}

const fn is_fp8(tensor: &TensorInfo) -> bool {
    matches!(tensor.dtype, Dtype::F8E4M3 | Dtype::F8E5M2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_whose_products_overflow_are_refused_by_name() {
        let check = |shape: &[u64], is_right: bool| {
            let (name, shape) = ("x".to_owned(), shape.to_vec());
            let tensor = TensorInfo { name, dtype: Dtype::U8, shape, offset: 0, size: 0 };
            let result = group(None, std::slice::from_ref(&tensor), &Descriptions::new());
            assert_eq!(result.is_ok(), is_right, "{:?}", tensor.shape);
            if let Err(error) = result {
                assert!(error.to_string().contains("\"x\""), "{error}");
            }
        };
        check(&[], true);
        check(&[0, 1 << 28, 1 << 28], true);
        check(&[0, 1 << 40, 1 << 40], false);
        check(&[1 << 40, 1 << 40, 0], false);
        check(&[u64::MAX], false);
    }
}
