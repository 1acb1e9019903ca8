//! Counters of the server itself, and one text of all counters.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::encoded;
use crate::ledger::Sums;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Response {
    path: &'static str,
    status: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refused {
    code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KeyTokens {
    key: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KeyRequests {
    key: String,
    outcome: &'static str,
}

/// Counters of what was answered, whichever model it was for.
pub(crate) struct FrontMetrics {
    registry: Registry,
    responses: Family<Response, Counter>,
    refused: Family<Refused, Counter>,
    key_tokens: Family<KeyTokens, Counter>,
    key_requests: Family<KeyRequests, Counter>,
    keys: Gauge,
    keys_reload_failed: Gauge,
}

impl FrontMetrics {
    /// Everything at zero; labelled with the model where there is but one.
    pub(crate) fn new(model: Option<&str>) -> Self {
        let mut registry = Registry::default();
        let labels = model.map(|model| ("model_name".into(), model.to_owned().into()));
        let r = registry.sub_registry_with_labels(labels.into_iter());
        let (responses, refused) = (Family::default(), Family::default());
        r.register(
            "shardpack_http_responses",
            "HTTP responses by route and status",
            Family::clone(&responses),
        );
        r.register(
            "shardpack_refused_requests",
            "Refused requests, by error code",
            Family::clone(&refused),
        );
        let (key_tokens, key_requests) = (Family::default(), Family::default());
        r.register(
            "shardpack_key_tokens",
            "Tokens by API key, since the file of usage began",
            Family::clone(&key_tokens),
        );
        r.register(
            "shardpack_key_requests",
            "Requests by API key, since the file of usage began",
            Family::clone(&key_requests),
        );
        let (keys, keys_reload_failed) = (Gauge::default(), Gauge::default());
        r.register("shardpack_keys", "API keys in use", keys.clone());
        r.register(
            "shardpack_keys_reload_failed",
            "1 while the file of API keys cannot be read again and the old keys are in use",
            keys_reload_failed.clone(),
        );
        Self { registry, responses, refused, key_tokens, key_requests, keys, keys_reload_failed }
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self) -> String {
        encoded(&self.registry)
    }

    /// Shows how many keys there are, and whether their file could be read when it changed last.
    pub(crate) fn set_keys(&self, keys: usize, reload_failed: bool) {
        self.keys.set(keys as i64);
        self.keys_reload_failed.set(i64::from(reload_failed));
    }

    /// Shows what was used by each key; requests without a key have the empty name.
    pub(crate) fn set_usage(&self, usage: Vec<(Option<String>, Sums)>) {
        let raise = |counter: &Counter, to: u64| {
            counter.inc_by(to.saturating_sub(counter.get()));
        };
        for (key, sums) in usage {
            let key = key.unwrap_or_default();
            let tokens = [
                ("prompt", sums.prompt_tokens),
                ("cached", sums.cached_tokens),
                ("completion", sums.completion_tokens),
            ];
            for (kind, count) in tokens {
                let labels = KeyTokens { key: key.clone(), kind };
                raise(&self.key_tokens.get_or_create(&labels), count);
            }
            for (outcome, count) in [("taken", sums.requests), ("refused", sums.refused)] {
                let labels = KeyRequests { key: key.clone(), outcome };
                raise(&self.key_requests.get_or_create(&labels), count);
            }
        }
    }

    /// A response has been made.
    pub(crate) fn responded(&self, path: &'static str, status: u16) {
        let labels = Response { path, status: u32::from(status) };
        self.responses.get_or_create(&labels).inc();
    }

    /// A request was refused.
    pub(crate) fn refused(&self, code: &str) {
        self.refused.get_or_create(&Refused { code: code.to_owned() }).inc();
    }
}

/// Marks the end of a text.
const END: &str = "# EOF\n";

/// Several texts as one, in which every family of metrics stands once, as the format demands.
pub(crate) fn merged(texts: &[String]) -> String {
    // Families in the order of their first appearance; those of different models are the same.
    let mut families: Vec<(&str, String, String)> = Vec::new();
    for text in texts {
        let mut current = None;
        for line in text.strip_suffix(END).unwrap_or(text).split_inclusive('\n') {
            let Some(comment) = line.strip_prefix("# ") else {
                if let Some((_, _, samples)) =
                    current.and_then(|index| families.get_mut::<usize>(index))
                {
                    samples.push_str(line);
                }
                continue;
            };
            // `HELP name …`, `TYPE name …`.
            let name = comment.split_whitespace().nth(1).unwrap_or_default();
            let known = families.iter().position(|(known, ..)| *known == name);
            let index = known.unwrap_or_else(|| {
                families.push((name, String::new(), String::new()));
                families.len() - 1
            });
            current = Some(index);
            let head = &mut families[index].1;
            if !head.contains(line) {
                head.push_str(line);
            }
        }
    }
    let parts = families.into_iter().flat_map(|(_, head, samples)| [head, samples]);
    parts.collect::<String>() + END
}

#[cfg(test)]
mod tests {
    use super::{super::Metrics, *};

    #[test]
    fn every_family_stands_once_with_the_samples_of_all_models() {
        let [a, b] = ["a", "b"].map(Metrics::new);
        b.ignored(3);
        let front = FrontMetrics::new(None);
        front.responded("/v1/models", 200);
        let text = merged(&[front.text(), a.text(None), b.text(None)]);
        let heads: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let distinct: std::collections::BTreeSet<&str> = heads.iter().copied().collect();
        assert_eq!(heads.len(), distinct.len(), "{text}");
        for line in [
            "shardpack_ignored_parameters_total{model_name=\"a\"} 0\nshardpack_ignored_parameters_total{model_name=\"b\"} 3\n",
            "shardpack_http_responses_total{path=\"/v1/models\",status=\"200\"} 1\n",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    }
}
