//! Matrices that llama.cpp's converter can store as one: those of queries, keys and values
//! (`--fuse-qkv`), and gate and up of every expert (`--fuse-gate-up-exps`). Rows of the one follow
//! the rows of the other; of experts in each expert's matrix.
//!
//! Source: `create_tensor_qkv` and `create_tensor_gate_up_exps` of llama.cpp.

use super::{GgufError, Half, Kind, Model, Part, Rows, Tensor};

/// Most experts of a layer: the largest published model has 512.
const MAX_EXPERTS: u64 = 4096;

/// What a tensor is made of.
#[derive(Clone, Copy)]
pub(super) enum Fused {
    /// Queries, keys and values.
    Attention,
    /// Gate and up of experts.
    Experts,
}

/// Queries, keys and values by themselves, in the order of their rows.
const ATTENTION: [&str; 3] = ["attn_q", "attn_k", "attn_v"];

/// Gate and up of experts by themselves, in the order of their rows.
const EXPERTS: [(&str, Half); 2] = [("ffn_gate_exps", Half::First), ("ffn_up_exps", Half::Second)];

impl Model<'_> {
    /// What a module is made of, unless the checkpoint has it as one too.
    pub(super) fn fused(&self, module: &str) -> Option<Fused> {
        let fused = match module {
            "attn_qkv" => Fused::Attention,
            "ffn_gate_up_exps" => Fused::Experts,
            _ => return None,
        };
        let as_one = self.architecture.own.iter().any(|(theirs, _)| *theirs == module);
        (!as_one).then_some(fused)
    }

    /// Adds the matrices of a fused tensor as if each stood by itself.
    pub(super) fn add_fused(
        &self,
        fused: Fused,
        tensor: &Tensor,
        (layer, ending): (&str, &str),
        parts: &mut Vec<Part>,
    ) -> Result<(), GgufError> {
        match fused {
            Fused::Attention => self.add_attention(tensor, (layer, ending), parts),
            Fused::Experts => self.add_experts(tensor, (layer, ending), parts),
        }
    }

    fn add_attention(
        &self,
        tensor: &Tensor,
        (layer, ending): (&str, &str),
        parts: &mut Vec<Part>,
    ) -> Result<(), GgufError> {
        let heads = self.needed_count("attention.head_count")?;
        let kv_heads = self.count("attention.head_count_kv")?.filter(|count| *count > 0);
        let kv_heads = kv_heads.unwrap_or(heads);
        let each = self.needed_count("embedding_length")? / heads;
        let key = self.count("attention.key_length")?.unwrap_or(each);
        let value = self.count("attention.value_length")?.unwrap_or(key);
        let sizes = [(heads, key), (kv_heads, key), (kv_heads, value)];
        let sizes = sizes.map(|(heads, head)| heads.saturating_mul(head));
        let rows = tensor.shape.first().copied().unwrap_or(0);
        if sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(*size)) != rows {
            let [queries, keys, values] = sizes;
            let problem = format!(
                "it has {rows} rows, expected {queries} of queries, {keys} of keys and {values} of values"
            );
            return Err(GgufError::Tensor { tensor: tensor.name.clone(), problem });
        }
        let mut first = 0;
        for (module, count) in ATTENTION.into_iter().zip(sizes) {
            let mut shape = tensor.shape.clone();
            if let Some(rows) = shape.first_mut() {
                *rows = count;
            }
            let row_bytes = tensor.size / rows;
            let alone = Tensor {
                name: format!("blk.{layer}.{module}.{ending}"),
                shape,
                offset: tensor.offset + first * row_bytes,
                size: count * row_bytes,
                ..tensor.clone()
            };
            first += count;
            self.add_piece(&alone, tensor, module, parts)?;
        }
        Ok(())
    }

    fn add_experts(
        &self,
        tensor: &Tensor,
        (layer, ending): (&str, &str),
        parts: &mut Vec<Part>,
    ) -> Result<(), GgufError> {
        let whole = Part {
            stored: tensor.name.clone(),
            name: None,
            kind: tensor.kind,
            shape: tensor.shape.clone(),
            offset: tensor.offset,
            size: tensor.size,
            rows: Rows::Same,
        };
        let names: Vec<[String; 2]> = EXPERTS
            .iter()
            .filter_map(|(module, _)| self.expert_name(layer, module, ending))
            .collect();
        if !names.is_empty() {
            return split_experts(&whole, &names, parts);
        }
        // Experts stay in stacks: each half is everywhere in the tensor.
        let is_bias = ending == "bias";
        let mut shape = tensor.shape.clone();
        let is_stack = shape.len() == if is_bias { 2 } else { 3 }
            && (!is_bias || matches!(tensor.kind, Kind::Floats(_)));
        let size = shape.get_mut(1).filter(|size| is_stack && size.is_multiple_of(2));
        let Some(size) = size else {
            let problem = format!("{:?} is no stack of gates and up projections", tensor.shape);
            return Err(GgufError::Tensor { tensor: tensor.name.clone(), problem });
        };
        *size /= 2;
        for (module, half) in EXPERTS {
            let name = format!("blk.{layer}.{module}.{ending}");
            let alone = Tensor { name, shape: shape.clone(), ..tensor.clone() };
            let first = parts.len();
            self.add_piece(&alone, tensor, module, parts)?;
            for part in &mut parts[first..] {
                part.rows = if is_bias { Rows::HalfColumns(half) } else { Rows::Half(half) };
            }
        }
        Ok(())
    }

    /// Adds a piece of a tensor under its own name; messages name the tensor that is in the file.
    fn add_piece(
        &self,
        alone: &Tensor,
        whole: &Tensor,
        module: &str,
        parts: &mut Vec<Part>,
    ) -> Result<(), GgufError> {
        let first = parts.len();
        self.add(alone, parts)?;
        for part in &mut parts[first..] {
            part.stored = format!("{}[{module}]", whole.name);
        }
        Ok(())
    }
}

/// The experts of a stack `[experts, …]`, which follow one another; of each expert the rows of
/// `names` follow one another, as many for each.
pub(super) fn split_experts(
    stack: &Part,
    names: &[[String; 2]],
    parts: &mut Vec<Part>,
) -> Result<(), GgufError> {
    let wrong = |problem: String| GgufError::Tensor { tensor: stack.stored.clone(), problem };
    let [count, shape @ ..] = stack.shape.as_slice() else {
        return Err(wrong("it is no stack of matrices".to_owned()));
    };
    let [rows, rest @ ..] = shape else {
        return Err(wrong(format!("{:?} is no stack of experts", stack.shape)));
    };
    let fused = names.len() as u64;
    if *count > MAX_EXPERTS || !rows.is_multiple_of(fused) {
        return Err(wrong(format!("{:?} is no stack of experts", stack.shape)));
    }
    let shape = [&[rows / fused], rest].concat();
    // Rows are whole blocks, so a matrix is too.
    let size = stack.size / count / fused;
    for expert in 0..*count {
        for (place, [before, after]) in (0..).zip(names) {
            let matrix = if fused > 1 { format!("[{place}]") } else { String::new() };
            parts.push(Part {
                stored: format!("{}[{expert}]{matrix}", stack.stored),
                name: Some(format!("{before}{expert}{after}")),
                shape: shape.clone(),
                offset: stack.offset + (expert * fused + place) * size,
                size,
                ..stack.clone()
            });
        }
    }
    Ok(())
}
