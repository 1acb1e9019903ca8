//! `AutoRound`'s description: tensors in the layouts of GPTQ or AWQ, with parameters of their own for
//! single modules (`extra_config`).
//!
//! Source: `export/export_to_autoround` and `inference/backend.py` of intel/auto-round. Of the
//! layouts only `auto_round:auto_gptq` stores zero points minus one.

use regex::RegexBuilder;

use super::{
    Awq, Gptq, Method, Modules, PerModule, Section,
    methods::{group_size, refused},
};
use crate::stored::StoredError;

/// Largest compiled expression of a module's name.
const MAX_EXPRESSION_BYTES: usize = 1 << 20;

/// The layout of the integers.
#[derive(Clone, Copy)]
enum Packing {
    Gptq { is_v2: bool },
    Awq,
}

/// What the description says of integers in one place.
struct Integers {
    bits: u64,
    group_size: Option<u64>,
}

pub(super) fn parse(section: &Section<'_>) -> Result<Method, StoredError> {
    // What else stands there is how the quantizer was run.
    let packing = packing(section)?;
    let main = integers(section, None)?;
    let main = main.ok_or_else(|| section.wrong("bits", "2, 4 or 8"))?;
    let mut overrides = Vec::new();
    if let Some(extra) = section.section("extra_config")? {
        for (name, _) in extra.keys() {
            let own = extra.section(name)?.ok_or_else(|| extra.wrong(name, "an object"))?;
            // With 16 bits it is not quantized: it has no integers that would be asked about.
            if let Some(integers) = integers(&own, Some(&main))? {
                overrides.push((modules(&extra, name)?, integers));
            }
        }
        // An exact name is asked before an expression that it matches too.
        overrides.sort_by_key(|(modules, _)| matches!(modules, Modules::Matching(_)));
    }
    Ok(match packing {
        Packing::Gptq { is_v2 } => {
            let gptq = |integers: &Integers| Gptq {
                bits: integers.bits as u32,
                group_size: integers.group_size,
                is_v2,
            };
            let own = |(modules, integers)| (modules, gptq(&integers));
            let overrides = overrides.into_iter().map(own).collect();
            Method::Gptq(PerModule { main: gptq(&main), overrides })
        }
        Packing::Awq => {
            if let Some(bits) = [&main]
                .into_iter()
                .chain(overrides.iter().map(|(_, own)| own))
                .map(|integers| integers.bits)
                .find(|bits| *bits != 4)
            {
                let format = format!("AutoRound (auto-round) in AWQ's layout with {bits} bits");
                return Err(refused(&format, "4 bits are read"));
            }
            let awq = |integers: &Integers| Awq { group_size: integers.group_size };
            let own = |(modules, integers)| (modules, awq(&integers));
            let overrides = overrides.into_iter().map(own).collect();
            Method::Awq(PerModule { main: awq(&main), overrides })
        }
    })
}

fn packing(section: &Section<'_>) -> Result<Packing, StoredError> {
    // Older versions name a kernel behind the layout, and the key is `backend`.
    let stated = section.text("packing_format")?.or(section.text("backend")?);
    let stated = stated.unwrap_or("auto_round:auto_gptq").replace("autoround", "auto_round");
    let layout = stated.strip_prefix("auto_round").unwrap_or(&stated).trim_start_matches(':');
    let layout = layout.split(':').next().unwrap_or_default();
    match layout {
        "auto_gptq" | "gptq" => Ok(Packing::Gptq { is_v2: false }),
        "" | "gptqmodel" | "exllamav2" | "tritonv2" | "triton" | "marlin" => {
            Ok(Packing::Gptq { is_v2: true })
        }
        "auto_awq" | "awq" => Ok(Packing::Awq),
        _ => {
            let reason =
                "auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq are read";
            Err(refused(&format!("AutoRound (auto-round) in the layout {stated}"), reason))
        }
    }
}

/// Bits and group size; none for floats of 16 bits or more.
fn integers(
    section: &Section<'_>,
    main: Option<&Integers>,
) -> Result<Option<Integers>, StoredError> {
    let bits = match (section.size("bits", 64)?, main) {
        (Some(bits), _) => bits,
        (None, Some(main)) => main.bits,
        (None, None) => return Err(section.wrong("bits", "2, 4 or 8")),
    };
    if bits >= 16 {
        return Ok(None);
    }
    if let Some(kind) = section.text("data_type")?
        && !kind.starts_with("int")
    {
        let format = format!("AutoRound (auto-round) of type {kind}");
        return Err(refused(&format, "integers are read"));
    }
    if !matches!(bits, 2 | 4 | 8) {
        let format = format!("AutoRound (auto-round) with {bits} bits");
        return Err(refused(&format, "2, 4 and 8 bits are read"));
    }
    let group_size = match main {
        Some(main) if !section.has("group_size") => main.group_size,
        _ => group_size(section)?,
    };
    Ok(Some(Integers { bits, group_size }))
}

fn modules(extra: &Section<'_>, name: &str) -> Result<Modules, StoredError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    if name.bytes().all(is_plain) && !name.contains("..") {
        return Ok(Modules::Named(name.to_owned()));
    }
    RegexBuilder::new(name)
        .size_limit(MAX_EXPRESSION_BYTES)
        .build()
        .map(Modules::Matching)
        .map_err(|_| extra.wrong(name, "a module's name, or a regular expression of names"))
}
