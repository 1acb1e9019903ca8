//! `shardpack inspect`.

use std::{fmt::Write as _, process::ExitCode};

use serde_json::json;
use shardpack_manifests::{Manifest, TensorShard, manifest::Quantization};

use super::{Outcome, package, plan, store};
use crate::{
    args::InspectArgs,
    progress::{result, size, table},
};

/// Runs the command.
pub(crate) fn run(args: &InspectArgs) -> Outcome {
    let path = store::packed(&args.path)?;
    let manifests: Vec<Manifest> = if package::is_set(&path) {
        let set = package::read_set(&path)?;
        package::folders(&path, &set)
            .iter()
            .map(|folder| package::read_manifest(folder))
            .collect::<Result<_, _>>()?
    } else {
        vec![package::read_manifest(&path)?]
    };
    if args.listing.form.json {
        let packages: Vec<_> =
            manifests.iter().map(|manifest| json(manifest, args.listing.tensors)).collect();
        result(&json!({ "packages": packages }).to_string());
    } else {
        result(text(&manifests, args.listing.tensors).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

fn json(manifest: &Manifest, tensors: bool) -> serde_json::Value {
    let mut value = json!({
        "rank": manifest.rank,
        "name": manifest.name,
        "ids": manifest.ids,
        "architecture": manifest.architecture.model_type,
        "quantization": manifest.quantization,
        "layout": manifest.layout,
        "files": manifest.files.iter().map(|file| json!({ "name": file.name, "size": file.size, "blake3": file.blake3 })).collect::<Vec<_>>(),
        "source": manifest.source,
    });
    if tensors {
        value["tensors"] = json!(manifest.tensors);
    }
    value
}

fn text(manifests: &[Manifest], tensors: bool) -> String {
    let Some(first) = manifests.first() else { return "an empty set".to_owned() };
    let (spec, layout) = (&first.architecture, &first.layout);
    let mut text = format!(
        "{} ({}), {} layers, hidden {}, {} heads ({} KV) of {}, FFN {}, vocabulary {}{}\n{}\n",
        first.name.as_deref().unwrap_or("a model"),
        spec.model_type,
        spec.layers.len(),
        spec.hidden_size,
        spec.attention.heads,
        spec.attention.kv_heads,
        spec.attention.head_dim,
        spec.ffn.size,
        spec.vocab_size,
        if spec.tied_embeddings { ", tied" } else { "" },
        quantization(&first.quantization),
    );
    let _ = write!(
        text,
        "weights {}\nmodel   {}\nlayout  {}\n\n",
        first.ids.weights, first.ids.model, first.ids.layout
    );
    let mut rows = vec![["rank", "files", "bytes"].map(str::to_owned).to_vec()];
    if !layout.stages.is_empty() {
        rows[0].push("layers".to_owned());
    }
    rows[0].extend(layout.axes.keys().cloned());
    for manifest in manifests {
        let bytes = manifest.files.iter().map(|file| file.size).sum();
        let mut row =
            vec![manifest.rank.to_string(), manifest.files.len().to_string(), size(bytes)];
        row.extend(plan::layers(layout, manifest.rank));
        row.extend(layout.axes.values().map(|axis| {
            let units = axis.units(manifest.rank);
            format!("{}..{}", units.start, units.end)
        }));
        rows.push(row);
    }
    text += &table(&rows);
    if tensors {
        for manifest in manifests {
            let _ = write!(text, "\nrank {}\n{}", manifest.rank, tensor_table(manifest));
        }
    }
    text
}

fn quantization(quantization: &Quantization) -> String {
    let Some(group) = quantization.group_size else {
        return format!("not quantized, {}", quantization.dtype);
    };
    let rounding = quantization.rounding.as_deref().unwrap_or("unknown");
    let mut text = match quantization.float {
        Some(format) => format!("{format}, other weights {}", quantization.dtype),
        None => format!(
            "{} bits in groups of {group}, rounding {rounding}, scales {}",
            quantization.bits, quantization.dtype
        ),
    };
    for (module, format) in &quantization.overrides {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  {module}: {format}");
    }
    text
}

fn tensor_table(manifest: &Manifest) -> String {
    let mut rows = vec![["tensor", "dtype", "shape", "shard", "file"].map(str::to_owned).to_vec()];
    for tensor in &manifest.tensors {
        let shard = match &tensor.shard {
            TensorShard::Replicated => "replicated".to_owned(),
            TensorShard::Once => "this rank only".to_owned(),
            TensorShard::Range { axis, dim, start, end, full } => {
                format!("{axis}: dim {dim}, {start}..{end} of {full}")
            }
        };
        let shape = format!("{:?}", tensor.shape);
        rows.push(vec![
            tensor.name.clone(),
            tensor.dtype.to_string(),
            shape,
            shard,
            tensor.file.clone(),
        ]);
    }
    table(&rows)
}
