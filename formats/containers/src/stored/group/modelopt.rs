//! nvidia-modelopt's matrices: FP8, NVFP4 and integers, by each tensor's own type; and torchao's.

use super::{Inventory, StoredError, expected, nvfp4, wrong};
use crate::{
    container::TensorInfo,
    stored::{Logical, elements::is_scale, fp4::Second, paired_rows::PairedRows},
};
use shardpack_quantize::dtype::Dtype;

/// Why they are dropped.
const ACTIVATIONS: &str = "a scale of activations, not of weights";

impl Inventory<'_> {
    pub(super) fn modelopt(&mut self) -> Result<(), StoredError> {
        for stem in self.stems(".weight_scale") {
            let name = format!("{stem}.weight");
            let scale = self.need(&format!("{name}_scale"), &name)?;
            let weight = self.need(&name, &scale.name)?;
            let second = self.take(&format!("{name}_scale_2"));
            match (weight.dtype, second) {
                (Dtype::F8E4M3, None) => {
                    self.add_scaled("modelopt FP8", weight, scale, None, None, None)?;
                }
                (Dtype::I8, None) => {
                    self.add_scaled("modelopt INT8", weight, scale, None, None, None)?;
                }
                (Dtype::U8, None) => self.modelopt_int4(name, weight, scale)?,
                (_, second) => {
                    let missing =
                        || wrong(&name, format!("it needs \"{name}_scale_2\", which is missing"));
                    let second = second.ok_or_else(missing)?;
                    let layout = nvfp4(weight, Second::Multiplies)?;
                    let leading = &weight.shape[..weight.shape.len() - 1];
                    let parts = (weight, scale, Some(second));
                    self.add_fp4("modelopt NVFP4", name, parts, layout, leading)?;
                }
            }
            self.scale_columns(&format!("{stem}.pre_quant_scale"))?;
        }
        Ok(())
    }

    /// Scales the columns of what was added last, if there is such a tensor.
    fn scale_columns(&mut self, name: &str) -> Result<(), StoredError> {
        let Some(scales) = self.take(name) else { return Ok(()) };
        let logical = self.grouped.tensors.last_mut().expect("a tensor was added before");
        let width = logical.width();
        if !is_scale(scales.dtype) || scales.shape.iter().product::<u64>() != width {
            return Err(expected(scales, &format!("floats [{width}]")));
        }
        logical.scale_columns(scales);
        Ok(())
    }

    fn modelopt_int4(
        &mut self,
        name: String,
        weight: &TensorInfo,
        scale: &TensorInfo,
    ) -> Result<(), StoredError> {
        let [outer @ .., half, width] = weight.shape.as_slice() else {
            return Err(expected(weight, "U8 […, out / 2, in]"));
        };
        let (height, width) = (2 * half, *width);
        let groups = scale.shape.last().copied().unwrap_or(0);
        let wanted = [outer, &[height, groups]].concat();
        let is_float = is_scale(scale.dtype) && scale.dtype.is_float();
        if !is_float || scale.shape != wanted || groups == 0 || !width.is_multiple_of(groups) {
            return Err(expected(
                scale,
                &format!("floats {wanted:?}, whole groups of {width} columns"),
            ));
        }
        let layout = PairedRows { width, groups, scale: scale.dtype };
        let shape = [outer, &[height, width]].concat();
        let parts = vec![weight.name.clone(), scale.name.clone()];
        let format = format!("modelopt INT4, groups of {}", width / groups);
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

    /// torchao: `X._weight_qdata` with `X._weight_scale`, and `X._weight_zero_point` for some.
    pub(super) fn torchao(&mut self) -> Result<(), StoredError> {
        for module in self.stems("._weight_qdata") {
            let name = format!("{module}.weight");
            let part = |part: &str| format!("{module}._weight_{part}");
            let weight = self.need(&part("qdata"), &name)?;
            let format = match weight.dtype {
                Dtype::I8 => "torchao INT8",
                Dtype::F8E4M3 => "torchao FP8",
                _ => {
                    let found = format!(
                        "torchao stores it as {} {:?}; of its forms integers in bytes (Int8Tensor, IntxUnpackedToInt8Tensor) and Float8Tensor are read; give the 16-bit original",
                        weight.dtype, weight.shape
                    );
                    return Err(wrong(&weight.name, found));
                }
            };
            let scale = self.need(&part("scale"), &name)?;
            let zero = self.take(&part("zero_point"));
            self.add_scaled(format, weight, scale, zero, None, Some(name))?;
            for key in ["act_quant_scale", "act_quant_zero_point"] {
                if self.take(&part(key)).is_some() {
                    self.grouped.dropped.push((part(key), ACTIVATIONS));
                }
            }
            self.scale_columns(&part("act_pre_scale"))?;
        }
        self.refuse_integers("torchao")
    }
}
