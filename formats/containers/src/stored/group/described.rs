//! Matrices whose shapes and parameters stand in small tensors beside them: bitsandbytes and HQQ.

use serde::Deserialize;

use super::{Inventory, StoredError, expected, wrong};
use crate::{
    container::TensorInfo,
    stored::{
        Logical,
        bitsandbytes::{EightBits, FourBits, Nested},
        elements::is_scale,
        hqq::{Axis, Hqq},
    },
};
use shardpack_quantize::dtype::Dtype;

/// Why they are dropped.
const READ: &str = "says how the weight beside it is stored";

/// What stands between a tensor of four bits and the name of their type.
pub(in crate::stored) const STATE: &str = ".quant_state.bitsandbytes__";

/// Of bitsandbytes: how the bytes of eight bits are laid out.
pub(in crate::stored) const BYTE_LAYOUT: &str = ".weight_format";

/// Of HQQ: what stands beside `W_q` and is no float.
pub(in crate::stored) const HQQ_META: &[&str] = &[
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
];

/// How a tensor of four bits came about.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: u64,
    dtype: String,
    shape: Vec<u64>,
    nested_blocksize: Option<u64>,
    nested_offset: Option<f64>,
}

impl Inventory<'_> {
    /// Takes a small tensor whose content is known, and drops it.
    fn description(&mut self, name: &str) -> Option<&[u8]> {
        self.left.remove(name)?;
        self.grouped.dropped.push((name.to_owned(), READ));
        self.descriptions.get(name).map(Vec::as_slice)
    }

    fn check_len(tensor: &TensorInfo, dtype: Dtype, len: u64) -> Result<(), StoredError> {
        if tensor.dtype == dtype && tensor.shape.iter().product::<u64>() == len {
            return Ok(());
        }
        Err(expected(tensor, &format!("{dtype} [{len}]")))
    }

    pub(super) fn bitsandbytes(&mut self) -> Result<(), StoredError> {
        let states: Vec<String> = self
            .left
            .keys()
            .filter(|name| name.contains(STATE))
            .map(|name| (*name).to_owned())
            .collect();
        for state in states {
            self.four_bits(&state)?;
        }
        for module in self.stems(".SCB") {
            self.eight_bits(&module)?;
        }
        self.refuse_integers("bitsandbytes")
    }

    /// Whether weights are left that nothing beside them explains.
    pub(super) fn refuse_integers(&self, format: &str) -> Result<(), StoredError> {
        let is_weight = |tensor: &&&TensorInfo| {
            let is_integer =
                matches!(tensor.dtype, Dtype::U8 | Dtype::I8 | Dtype::I32 | Dtype::U32);
            is_integer && tensor.name.ends_with("weight")
        };
        match self.left.values().find(is_weight) {
            None => Ok(()),
            Some(tensor) => Err(wrong(
                &tensor.name,
                format!(
                    "it is {} {:?}, and nothing beside it says how {format} stored it, as config.json says it did; save the checkpoint again with a present version",
                    tensor.dtype, tensor.shape
                ),
            )),
        }
    }

    fn four_bits(&mut self, described_by: &str) -> Result<(), StoredError> {
        let (name, _) = described_by.split_once(STATE).expect("the caller found it");
        let bytes = self.description(described_by).unwrap_or_default();
        let state: State = serde_json::from_slice(bytes).map_err(|error| {
            wrong(described_by, format!("it is no description of a bitsandbytes tensor: {error}"))
        })?;
        let elements = state.shape.iter().try_fold(1_u64, |all, dim| all.checked_mul(*dim));
        let weight = self.need(name, described_by)?;
        let width = state.shape.last().copied().unwrap_or(0);
        let elements = elements
            .filter(|elements| width > 0 && elements.div_ceil(2) == weight.size)
            .ok_or_else(|| expected(weight, &format!("four bits for each of {:?}", state.shape)))?;
        if state.blocksize == 0 {
            return Err(wrong(described_by, "its blocksize is 0"));
        }
        let blocks = elements.div_ceil(state.blocksize);
        let table = self.need(&format!("{name}.quant_map"), name)?;
        Self::check_len(table, Dtype::F32, 16)?;
        let magnitudes = self.need(&format!("{name}.absmax"), name)?;
        let mut parts = vec![weight, table, magnitudes];
        let nested = match (state.nested_blocksize, state.nested_offset) {
            (Some(block), Some(offset)) if block > 0 => {
                Self::check_len(magnitudes, Dtype::U8, blocks)?;
                let map = self.need(&format!("{name}.nested_quant_map"), name)?;
                Self::check_len(map, Dtype::F32, 256)?;
                let outer = self.need(&format!("{name}.nested_absmax"), name)?;
                Self::check_len(outer, Dtype::F32, blocks.div_ceil(block))?;
                parts.extend([map, outer]);
                Some(Nested { block, offset: offset as f32 })
            }
            _ => {
                Self::check_len(magnitudes, Dtype::F32, blocks)?;
                None
            }
        };
        let native = match state.dtype.as_str() {
            "float16" => Dtype::F16,
            "float32" => Dtype::F32,
            _ => Dtype::BF16,
        };
        let layout = FourBits { elements, width, block: state.blocksize, nested };
        let double = if nested.is_some() { ", nested" } else { "" };
        let format =
            format!("bitsandbytes {}{double}, blocks of {}", state.quant_type, state.blocksize);
        let parts = parts.into_iter().map(|part| part.name.clone()).collect();
        let logical = Logical::decoded(name.to_owned(), state.shape, native, format, parts, layout);
        self.grouped.tensors.push(logical);
        Ok(())
    }

    fn eight_bits(&mut self, module: &str) -> Result<(), StoredError> {
        let name = format!("{module}.weight");
        let magnitudes = self.need(&format!("{module}.SCB"), &name)?;
        let weight = self.need(&name, &magnitudes.name)?;
        let layout_name = format!("{module}{BYTE_LAYOUT}");
        let by_rows =
            self.description(&layout_name).is_none_or(|bytes| bytes.iter().all(|byte| *byte == 0));
        if !by_rows {
            let problem = "bitsandbytes has its bytes in the order of a device, not row after row; save it again with a present version";
            return Err(wrong(&layout_name, problem));
        }
        let [height, width] = weight.shape[..] else {
            return Err(expected(weight, "I8 with two dimensions"));
        };
        Self::check_len(weight, Dtype::I8, height * width)?;
        Self::check_len(magnitudes, Dtype::F32, height)?;
        let parts = vec![weight.name.clone(), magnitudes.name.clone()];
        let (shape, format) = (vec![height, width], "bitsandbytes INT8".to_owned());
        let logical = Logical::decoded(name, shape, Dtype::F16, format, parts, EightBits { width });
        self.grouped.tensors.push(logical);
        Ok(())
    }

    pub(super) fn hqq(&mut self) -> Result<(), StoredError> {
        for module in self.stems(".W_q") {
            self.hqq_matrix(&module)?;
        }
        self.refuse_integers("HQQ")
    }

    fn hqq_matrix(&mut self, module: &str) -> Result<(), StoredError> {
        let name = format!("{module}.weight");
        let weight = self.need(&format!("{module}.W_q"), &name)?;
        let scale = self.need(&format!("{module}.scale"), &name)?;
        let zero = self.need(&format!("{module}.zero"), &name)?;
        let shape = self.integers(&format!("{module}.shape"));
        let one = |values: Option<Vec<u64>>| match values.as_deref() {
            Some([value]) => Some(*value),
            _ => None,
        };
        let bits = one(self.integers(&format!("{module}.nbits")));
        let axis = one(self.integers(&format!("{module}.axis")));
        for key in HQQ_META {
            let _ = self.description(&format!("{module}.{key}"));
        }
        let (Some(shape), Some(bits), Some(axis)) = (shape, bits, axis) else {
            let problem = "hqq keeps shape, nbits and axis beside it, which are missing; save it again with a present version";
            return Err(wrong(&weight.name, problem));
        };
        if !matches!(bits, 1 | 2 | 4 | 8) {
            return Err(wrong(
                &weight.name,
                format!("hqq with {bits} bits; 1, 2, 4 and 8 bits are read"),
            ));
        }
        let axis = match axis {
            1 => Axis::Neighbours,
            0 => Axis::Every,
            other => return Err(wrong(&weight.name, format!("hqq along axis {other}"))),
        };
        let elements = shape.iter().try_fold(1_u64, |all, dim| all.checked_mul(*dim));
        let [_, width] = shape[..] else {
            return Err(wrong(&weight.name, format!("its shape {shape:?} is no matrix")));
        };
        let elements = elements
            .filter(|elements| {
                *elements > 0 && elements.checked_mul(bits) == weight.size.checked_mul(8)
            })
            .ok_or_else(|| expected(weight, &format!("{bits} bits for each of {shape:?}")))?;
        let groups: u64 = scale.shape.iter().product();
        let is_right = |tensor: &TensorInfo| {
            is_scale(tensor.dtype) && tensor.dtype.is_float() && tensor.shape == scale.shape
        };
        if groups == 0 || !elements.is_multiple_of(groups) || !is_right(scale) || !is_right(zero) {
            return Err(expected(
                scale,
                &format!("floats, one for each group, as {} has", zero.name),
            ));
        }
        let bits = bits as u32;
        let layout =
            Hqq { bits, elements, width, groups, axis, scale: scale.dtype, zero: zero.dtype };
        let format = format!("HQQ, {bits} bits in groups of {}", elements / groups);
        let parts = [weight, scale, zero].map(|part| part.name.clone()).to_vec();
        self.grouped.tensors.push(Logical::decoded(
            name,
            shape,
            scale.dtype,
            format,
            parts,
            layout,
        ));
        Ok(())
    }

    /// The integers of a small tensor.
    fn integers(&mut self, name: &str) -> Option<Vec<u64>> {
        let dtype = self.left.get(name)?.dtype;
        let bytes = self.description(name)?;
        let size = match dtype {
            Dtype::I64 => 8,
            Dtype::I32 => 4,
            _ => return None,
        };
        Some(
            bytes
                .chunks_exact(size)
                .map(|bytes| {
                    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
                })
                .collect(),
        )
    }
}
