//! Tensors of a layer under the other names that tools give them: the same block under another
//! published name, experts one by one, stacked or with gates and ups in one tensor, as checkpoints
//! that were saved again or quantized elsewhere have them. Knows no family: what a rule expects and
//! the shapes decide.

use super::View;
use crate::rules::{Role, Turn};

/// Where layers keep their feed-forward parts, as publishers and tools call it.
const BLOCKS: &[&str] =
    &["mlp.", "block_sparse_moe.", "feed_forward.", "moe.", "mixer.", "ffn.", "shared_mlp.", ""];

/// What holds the experts within it.
const STACKS: &[&str] = &["experts.", "switch_mlp.", "switch_glu.", "experts.switch_glu.", ""];

/// Names of the projections of an expert.
const GATES: &[&str] = &["gate_proj", "w1"];
const UPS: &[&str] = &["up_proj", "w3"];
/// Where experts have no gates.
const PLAIN_UPS: &[&str] = &["up_proj", "fc1", "w1"];
const DOWNS: &[&str] = &["down_proj", "w2", "fc2"];

/// Gates and ups in one tensor.
const FUSED: &[&str] =
    &["gate_up_proj", "gate_up_proj.weight", "input_linear.weight", "w13", "w13_weight"];
const FUSED_DOWNS: &[&str] = &["output_linear.weight", "w2_weight"];

/// Names of routers and of the corrections of their choice, within the block.
const ROUTERS: &[&str] = &[
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.classifier.weight",
    "gate.gate.weight",
    "gate.gate_proj.weight",
    "gate.wg.weight",
    "router.gate.weight",
];
const CORRECTIONS: &[&str] = &[
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "router.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "experts.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "router.expert_bias",
    "expert_bias",
    "gate.bias",
    "gate.gate_proj.bias",
    "gate.router_bias",
    "router_bias",
];

/// What holds the experts that every token sees, within the block.
const SHARED: &[&str] = &["shared_expert.", "shared_experts.", "shared_mlp.", "share_expert."];

/// Other names of single tensors within a layer, as mlx-lm and transformers' modules have them.
const SPELLINGS: &[(&str, &str)] = &[
    (".A_log", ".forget_gate.A_log"),
    (".dt_bias", ".forget_gate.dt_bias"),
    (".f_a_proj.weight", ".forget_gate.f_a_proj.weight"),
    (".f_b_proj.weight", ".forget_gate.f_b_proj.weight"),
    ("attention_sink_bias", "sinks"),
    ("post_attn_norm.weight", "post_self_attn_layernorm.weight"),
    ("post_ffn_norm.weight", "post_mlp_layernorm.weight"),
    ("post_mlp_layernorm.weight", "mlp.post_mlp_layernorm.weight"),
    ("q_conv1d.weight", "q_conv.conv.weight"),
    ("k_conv1d.weight", "k_conv.conv.weight"),
    ("v_conv1d.weight", "v_conv.conv.weight"),
    (".w1.weight", ".gate_proj.weight"),
    (".w3.weight", ".up_proj.weight"),
    (".w2.weight", ".down_proj.weight"),
];

/// One way in which a tensor could be there.
pub(super) struct Candidate {
    /// Its sources, in order.
    pub(super) names: Vec<String>,
    /// The shape of each.
    pub(super) shape: Vec<u64>,
    /// What of each it is.
    pub(super) view: View,
}

/// What is looked for.
pub(super) struct Lost<'a> {
    /// Every name by which the rules know it in this layer, its own first.
    pub(super) names: &'a [String],
    pub(super) shape: &'a [u64],
    pub(super) role: Role,
    /// Whether its first dimension counts experts.
    pub(super) of_experts: bool,
    /// Whether experts have gates.
    pub(super) gated: bool,
    /// Whether the family's own experts are stored `[in, out]`, which names alone do not say.
    pub(super) turned: bool,
}

/// A projection of experts.
#[derive(Clone, Copy)]
enum Projection {
    Gate,
    Up,
    Down,
}

/// A name up to its layer's parts, and the rest: `model.layers.3.` and `mlp.gate.weight`.
fn split(name: &str) -> Option<(&str, &str)> {
    let mut at = 0;
    for part in name.split('.') {
        at += part.len() + 1;
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return (at < name.len()).then(|| name.split_at(at));
        }
    }
    None
}

/// A layer's part without the block that it stands in.
fn within_block(rest: &str) -> &str {
    let mut blocks = BLOCKS.iter().filter(|block| !block.is_empty());
    blocks.find_map(|block| rest.strip_prefix(block)).unwrap_or(rest)
}

impl Lost<'_> {
    /// Every way, the likeliest first.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let mut prefixes: Vec<&str> = Vec::new();
        for prefix in self.names.iter().filter_map(|name| Some(split(name)?.0)) {
            if !prefixes.contains(&prefix) {
                prefixes.push(prefix);
            }
        }
        let mut found = Vec::new();
        for prefix in prefixes {
            match self.projection() {
                Some(projection) => self.experts(prefix, projection, &mut found),
                None => self.single(prefix, &mut found),
            }
        }
        found
    }

    fn projection(&self) -> Option<Projection> {
        if !self.of_experts {
            return None;
        }
        let name = self.names[0].rsplit_once('.').map_or(&*self.names[0], |(module, _)| module);
        match name.rsplit('.').next()? {
            "gate_proj" => Some(Projection::Gate),
            "up_proj" => Some(Projection::Up),
            "down_proj" => Some(Projection::Down),
            _ => None,
        }
    }

    fn single(&self, prefix: &str, found: &mut Vec<Candidate>) {
        let mut push = |name: String| {
            if !self.names.contains(&name) {
                let [rows, columns] = super::rows_and_columns(self.shape);
                let (names, shape) = (vec![name], self.shape.to_vec());
                found.push(Candidate { names, shape, view: View::whole(rows, columns) });
            }
        };
        for name in self.names {
            let Some((_, rest)) = split(name) else { continue };
            for (from, to) in SPELLINGS {
                if let Some(start) = rest.strip_suffix(from) {
                    push(format!("{prefix}{start}{to}"));
                }
            }
        }
        // By its own last name beside what the rules make it of.
        let own = split(&self.names[0]).and_then(|(_, rest)| rest.rsplit_once('.'));
        if let Some((module, ending)) = own {
            let leaf = module.rsplit('.').next().unwrap_or(module);
            for other in &self.names[1..] {
                let place = other.rsplit_once('.').and_then(|(module, _)| module.rsplit_once('.'));
                if let Some((place, _)) = place.filter(|(place, _)| place.starts_with(prefix)) {
                    push(format!("{place}.{leaf}.{ending}"));
                }
            }
        }
        for name in self.names {
            let Some((_, rest)) = split(name) else { continue };
            let inner = within_block(rest);
            // Attention and norms have one place; only feed-forward parts move.
            if inner == rest && !self.is_routing(inner) {
                continue;
            }
            let shared = SHARED.iter().find_map(|shared| inner.strip_prefix(shared));
            for block in BLOCKS {
                push(format!("{prefix}{block}{inner}"));
                for other in shared.iter().flat_map(|_| SHARED) {
                    push(format!("{prefix}{block}{other}{}", shared.unwrap_or_default()));
                }
                for list in [ROUTERS, CORRECTIONS] {
                    if list.contains(&inner) {
                        for other in list {
                            push(format!("{prefix}{block}{other}"));
                        }
                    }
                }
            }
        }
    }

    fn is_routing(&self, inner: &str) -> bool {
        self.role == Role::Router || CORRECTIONS.contains(&inner)
    }

    fn experts(&self, prefix: &str, projection: Projection, found: &mut Vec<Candidate>) {
        let names = match projection {
            Projection::Gate => GATES,
            Projection::Up if self.gated => UPS,
            Projection::Up => PLAIN_UPS,
            Projection::Down => DOWNS,
        };
        let leaf = self.names[0].rsplit('.').next();
        let ending = if leaf == Some("bias") { ".bias" } else { ".weight" };
        for block in BLOCKS {
            for stack in STACKS {
                let place = format!("{prefix}{block}{stack}");
                for name in names {
                    self.push_apart(&place, &format!("{name}{ending}"), found);
                    self.push_stacked(format!("{place}{name}{ending}"), found);
                    if ending == ".weight" {
                        self.push_stacked(format!("{place}{name}"), found);
                    }
                }
                if ending == ".weight" {
                    self.push_fused(&place, projection, found);
                }
            }
        }
    }

    /// One matrix for each expert.
    fn push_apart(&self, place: &str, name: &str, found: &mut Vec<Candidate>) {
        let own = &self.shape[1..];
        let [rows, columns] = super::rows_and_columns(own);
        // Rows of a bias are its single elements, put together to one row for each expert.
        let view = View::whole(rows, columns);
        let names = (0..self.shape[0]).map(|expert| format!("{place}{expert}.{name}")).collect();
        found.push(Candidate { names, shape: own.to_vec(), view });
    }

    fn push_stacked(&self, name: String, found: &mut Vec<Candidate>) {
        if self.names[0] == name {
            return;
        }
        if let &[experts, out, inner] = self.shape {
            let view = View { blocks: experts, ..View::whole(out, inner) };
            let as_is = (vec![experts, out, inner], view);
            let turned = (vec![experts, inner, out], View { turn: Turn::Source, ..as_is.1 });
            // A square one is as the family's own.
            let bare = !name.ends_with(".weight");
            let forms = if self.turned && bare { [turned, as_is] } else { [as_is, turned] };
            for (shape, view) in forms {
                found.push(Candidate { names: vec![name.clone()], shape, view });
            }
            return;
        }
        let [rows, columns] = super::rows_and_columns(self.shape);
        let view = View::whole(rows, columns);
        found.push(Candidate { names: vec![name], shape: self.shape.to_vec(), view });
    }

    fn push_fused(&self, place: &str, projection: Projection, found: &mut Vec<Candidate>) {
        let &[experts, out, inner] = self.shape else { return };
        let first = match projection {
            Projection::Down => {
                for name in FUSED_DOWNS {
                    self.push_stacked(format!("{place}{name}"), found);
                }
                return;
            }
            Projection::Gate => 0,
            Projection::Up => out,
        };
        let part = View { first, count: out, ..View::whole(2 * out, inner) };
        for name in FUSED {
            let whole = View { blocks: experts, ..part };
            let as_is = (vec![experts, 2 * out, inner], whole);
            let turned = (vec![experts, inner, 2 * out], View { turn: Turn::Source, ..whole });
            let forms = if self.turned { [turned, as_is] } else { [as_is, turned] };
            for (shape, view) in forms {
                found.push(Candidate { names: vec![format!("{place}{name}")], shape, view });
            }
            let names = (0..experts).map(|expert| format!("{place}{expert}.{name}")).collect();
            found.push(Candidate { names, shape: vec![2 * out, inner], view: part });
        }
    }
}
