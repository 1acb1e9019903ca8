//! What clients are told of the served model beyond its text side: what it is made of and how large
//! it is. It must not know how packages are read.

use serde_json::{Map, Value, json};

/// Facts of a model, from the manifests of its packages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Digest that names it, 64 hex digits.
    pub digest: String,
    /// Bytes of all its packages.
    pub size_bytes: u64,
    /// `model_type` of its configuration.
    pub family: String,
    /// Repository on the hub (`org/model`), if it came from there.
    pub repository: Option<String>,
    /// Commit of the repository.
    pub commit: Option<String>,
    /// The file of the repository that it was made of, where that is one GGUF file.
    pub gguf: Option<String>,
    /// What was chosen at its conversion beside bits and the number of ranks.
    pub conversion: Vec<String>,
    /// Ranks that it is sharded for.
    pub ranks: u32,
    /// Nodes that hold its packages, in rank order; none where they are on the server's machine.
    pub nodes: Vec<String>,
    /// Elements of all its weights.
    pub parameter_count: u64,
    /// Bits per weight of most of its matrices; 16 where they are not quantized.
    pub bits: u32,
    /// Element type of what is not quantized, in upper case.
    pub dtype: String,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Inner width of the feed-forward part.
    pub ffn_size: u32,
    /// Rows of the embedding.
    pub vocab_size: u32,
}

impl ModelInfo {
    /// The number of parameters as people say it: `134.52M`, `8.2B`.
    pub(super) fn parameter_size(&self) -> String {
        let count = self.parameter_count;
        // Exact up to 2^53 parameters.
        let of = |unit: u64| count as f64 / unit as f64;
        match count {
            0 => String::new(),
            1_000_000_000.. => format!("{:.1}B", of(1_000_000_000)),
            1_000_000.. => format!("{:.2}M", of(1_000_000)),
            _ => format!("{:.0}K", of(1000)),
        }
    }

    /// The form of the weights, as Ollama names those that are not of GGUF.
    pub(super) fn quantization_level(&self) -> String {
        match self.bits {
            0 | 16 => self.dtype.clone(),
            bits => format!("int{bits}"),
        }
    }

    /// The architecture's name in keys.
    pub(super) fn architecture(&self) -> &str {
        if self.family.is_empty() { "shardpack" } else { &self.family }
    }

    /// Keys and values as a GGUF file has them, under the name that clients are to show.
    pub(super) fn keys(&self, name: &str, context: u32) -> Map<String, Value> {
        let architecture = self.architecture();
        let of = |key: &str| format!("{architecture}.{key}");
        let mut keys = Map::new();
        let mut add = |key: String, value: Value| keys.insert(key, value);
        add("general.architecture".to_owned(), architecture.into());
        add("general.basename".to_owned(), name.into());
        add("general.type".to_owned(), "model".into());
        add(of("context_length"), context.into());
        if let Some(repository) = &self.repository {
            add("general.source.huggingface.repository".to_owned(), repository.as_str().into());
        }
        let counts = [
            ("general.parameter_count".to_owned(), self.parameter_count),
            (of("embedding_length"), self.hidden_size.into()),
            (of("block_count"), self.layers.into()),
            (of("attention.head_count"), self.heads.into()),
            (of("attention.head_count_kv"), self.kv_heads.into()),
            (of("feed_forward_length"), self.ffn_size.into()),
            (of("vocab_size"), self.vocab_size.into()),
        ];
        for (key, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            add(key, count.into());
        }
        keys
    }

    /// Where it came from, for whoever looks for a newer one.
    pub(super) fn source(&self) -> Value {
        json!({
            "repository": self.repository,
            "commit": self.commit,
            "gguf": self.gguf,
            "bits": self.bits,
            "ranks": self.ranks,
            "conversion": self.conversion,
            "nodes": self.nodes,
        })
    }

    /// `details`, as Ollama has them.
    pub(super) fn details(&self, context: u32) -> Value {
        json!({
            "parent_model": "",
            "format": "safetensors",
            "family": self.architecture(),
            "families": [self.architecture()],
            "parameter_size": self.parameter_size(),
            "quantization_level": self.quantization_level(),
            "context_length": context,
            "embedding_length": self.hidden_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_as_people_say_it() {
        let check = |parameter_count: u64, expected: &str| {
            let info = ModelInfo { parameter_count, ..ModelInfo::default() };
            assert_eq!(info.parameter_size(), expected);
        };
        check(0, "");
        check(56_000, "56K");
        check(134_515_008, "134.52M");
        check(8_190_735_360, "8.2B");
        check(671_026_404_352, "671.0B");
    }
}
