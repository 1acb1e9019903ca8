//! The route table, from which come the router, the scopes, the error formats and the `OpenAPI`
//! description.

use axum::http::{Method, Uri};

use super::{
    dialect::{Dialect, EmbeddingDialect},
    error::Shape,
    keys::{Access, Scope},
};

/// A route.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) method: &'static str,
    /// As axum writes it.
    pub(super) path: &'static str,
    pub(super) target: Target,
    pub(super) access: Access,
    pub(super) shape: Shape,
    /// What it does, in a few words.
    pub(super) summary: &'static str,
}

/// The handler of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The model, in a dialect.
    Generate(Dialect),
    /// Embeddings, in a dialect.
    Embed(EmbeddingDialect),
    Rerank,
    Page,
    OpenApi,
    Health,
    Live,
    Ready,
    Metrics,
    Stats,
    Events,
    Usage,
    Props,
    Models,
    Model,
    LoadModel,
    UnloadModel,
    SwapModel,
    VerifyModel,
    CountTokens,
    CountInputTokens,
    Tokenize,
    Detokenize,
    TokenizerInfo,
    ApplyTemplate,
    OllamaTags,
    OllamaShow,
    OllamaPs,
    OllamaVersion,
    OllamaPull,
    OllamaDelete,
    LmStudioModels,
    LmStudioModel,
    ResponseShow,
    ResponseInput,
    ResponseCancel,
    ResponseForget,
}

const INFER: Access = Access::Scope(Scope::Infer);
const ADMIN: Access = Access::Scope(Scope::Admin);

const fn get(path: &'static str, target: Target, access: Access, summary: &'static str) -> Route {
    Route { method: "GET", path, target, access, shape: Shape::OpenAi, summary }
}

const fn post(path: &'static str, target: Target, shape: Shape, summary: &'static str) -> Route {
    Route { method: "POST", path, target, access: INFER, shape, summary }
}

const fn admin(path: &'static str, target: Target, summary: &'static str) -> Route {
    Route { method: "POST", path, target, access: ADMIN, shape: Shape::OpenAi, summary }
}

const fn ollama(
    path: &'static str,
    target: Target,
    access: Access,
    summary: &'static str,
) -> Route {
    Route { method: "GET", path, target, access, shape: Shape::Ollama, summary }
}

const RESPONSE: &str = "/v1/responses/{id}";

/// Every route.
pub(super) const ROUTES: &[Route] = &[
    get("/", Target::Page, Access::Public, "Web page: chat and server status"),
    get("/openapi.json", Target::OpenApi, Access::Public, "This description"),
    get(
        "/health",
        Target::Health,
        Access::Public,
        "Health of the engine, with the reason if it is not ready",
    ),
    get("/livez", Target::Live, Access::Public, "Liveness probe"),
    get("/readyz", Target::Ready, Access::Public, "Readiness probe"),
    get("/metrics", Target::Metrics, Access::Scope(Scope::Metrics), "Counters for Prometheus"),
    get("/stats", Target::Stats, Access::Watch, "Statistics of the web page"),
    get("/events", Target::Events, Access::Watch, "What happened since the server started"),
    get("/v1/usage", Target::Usage, INFER, "What keys have used, by hour or day"),
    get("/props", Target::Props, INFER, "Default sampling, context and chat template"),
    get("/v1/models", Target::Models, Access::Watch, "The models served"),
    get("/v1/models/{*id}", Target::Model, Access::Watch, "One model"),
    admin("/v1/models/load", Target::LoadModel, "Load a model, and wait until it answers"),
    admin("/v1/models/unload", Target::UnloadModel, "Unload a model after its running requests"),
    admin("/v1/models/swap", Target::SwapModel, "Serve a model from another set, without a pause"),
    admin("/v1/models/verify", Target::VerifyModel, "Verify every byte of a model's packages"),
    post(
        "/v1/chat/completions",
        Target::Generate(Dialect::Chat),
        Shape::OpenAi,
        "Continue a conversation (OpenAI chat completions)",
    ),
    post(
        "/v1/completions",
        Target::Generate(Dialect::Completions),
        Shape::OpenAi,
        "Continue a text (OpenAI completions)",
    ),
    post(
        "/v1/responses",
        Target::Generate(Dialect::Responses),
        Shape::OpenAi,
        "Continue a conversation (OpenAI responses)",
    ),
    post(
        "/v1/responses/compact",
        Target::Generate(Dialect::Compaction),
        Shape::OpenAi,
        "Replace a conversation by a summary (OpenAI responses)",
    ),
    post(
        "/v1/responses/input_tokens",
        Target::CountInputTokens,
        Shape::OpenAi,
        "Count the tokens of a conversation (OpenAI responses)",
    ),
    post(
        "/v1/embeddings",
        Target::Embed(EmbeddingDialect::OpenAi),
        Shape::OpenAi,
        "Embeddings of texts (OpenAI)",
    ),
    post("/v1/rerank", Target::Rerank, Shape::OpenAi, "Order documents by relevance (Cohere)"),
    post("/v2/rerank", Target::Rerank, Shape::OpenAi, "Order documents by relevance (Cohere)"),
    post("/rerank", Target::Rerank, Shape::OpenAi, "Order documents by relevance (Jina, TEI)"),
    get(RESPONSE, Target::ResponseShow, INFER, "Retrieve a stored response"),
    get(
        "/v1/responses/{id}/input_items",
        Target::ResponseInput,
        INFER,
        "List what a stored response answers",
    ),
    post(
        "/v1/responses/{id}/cancel",
        Target::ResponseCancel,
        Shape::OpenAi,
        "Refused: no response runs in the background",
    ),
    Route {
        method: "DELETE",
        path: RESPONSE,
        target: Target::ResponseForget,
        access: INFER,
        shape: Shape::OpenAi,
        summary: "Delete a stored response",
    },
    post(
        "/v1/messages",
        Target::Generate(Dialect::Messages),
        Shape::Anthropic,
        "Continue a conversation (Anthropic messages)",
    ),
    post(
        "/v1/messages/count_tokens",
        Target::CountTokens,
        Shape::Anthropic,
        "Count the tokens of a conversation (Anthropic messages)",
    ),
    post("/tokenize", Target::Tokenize, Shape::OpenAi, "Tokenize a text or a conversation"),
    post("/detokenize", Target::Detokenize, Shape::OpenAi, "Detokenize tokens"),
    get(
        "/tokenizer_info",
        Target::TokenizerInfo,
        INFER,
        "The tokenizer's settings and the chat template",
    ),
    post(
        "/apply-template",
        Target::ApplyTemplate,
        Shape::OpenAi,
        "Render a conversation with the chat template",
    ),
    post(
        "/api/chat",
        Target::Generate(Dialect::OllamaChat),
        Shape::Ollama,
        "Continue a conversation (Ollama)",
    ),
    post(
        "/api/generate",
        Target::Generate(Dialect::OllamaGenerate),
        Shape::Ollama,
        "Answer a prompt (Ollama)",
    ),
    post(
        "/api/embed",
        Target::Embed(EmbeddingDialect::Ollama),
        Shape::Ollama,
        "Embeddings of texts (Ollama)",
    ),
    post(
        "/api/embeddings",
        Target::Embed(EmbeddingDialect::OllamaSingle),
        Shape::Ollama,
        "The embedding of a text (Ollama)",
    ),
    post("/api/show", Target::OllamaShow, Shape::Ollama, "One model (Ollama)"),
    ollama("/api/tags", Target::OllamaTags, Access::Watch, "The models (Ollama)"),
    ollama("/api/ps", Target::OllamaPs, Access::Watch, "Running models (Ollama)"),
    ollama("/api/version", Target::OllamaVersion, Access::Public, "The version (Ollama)"),
    post("/api/pull", Target::OllamaPull, Shape::Ollama, "Fetch a model (Ollama)"),
    Route {
        method: "DELETE",
        path: "/api/delete",
        target: Target::OllamaDelete,
        access: ADMIN,
        shape: Shape::Ollama,
        summary: "Delete a model (Ollama)",
    },
    get("/api/v0/models", Target::LmStudioModels, Access::Watch, "The models served (LM Studio)"),
    get("/api/v0/models/{*id}", Target::LmStudioModel, Access::Watch, "One model (LM Studio)"),
    post(
        "/api/v0/chat/completions",
        Target::Generate(Dialect::Chat),
        Shape::OpenAi,
        "Continue a conversation (LM Studio's address)",
    ),
    post(
        "/api/v0/completions",
        Target::Generate(Dialect::Completions),
        Shape::OpenAi,
        "Continue a text (LM Studio's address)",
    ),
];

/// The route of a request.
pub(super) fn route_of(method: &Method, path: &str) -> Option<&'static Route> {
    let is_asked = |route: &&Route| {
        route.method == method.as_str() || (method == Method::HEAD && route.method == "GET")
    };
    ROUTES.iter().filter(|route| route.has(path)).find(is_asked)
}

/// Prefixes that clients put before a path of this server: a second `/v1`, and prefixes of other servers.
const PREFIXES: [&str; 3] = ["/v1", "/api", "/openai"];

/// The canonical form of an address whose base and path a client joined in another way: `/v1` missing or
/// repeated, extra slashes, another server's prefix. None for a canonical address and for an unknown one.
pub(super) fn canonical(uri: &Uri) -> Option<Uri> {
    let is_known = |path: &str| ROUTES.iter().any(|route| route.has(path));
    if is_known(uri.path()) {
        return None;
    }
    let parts: Vec<&str> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
    let plain = ["/", &parts.join("/")].concat();
    let without = PREFIXES.iter().filter_map(|prefix| plain.strip_prefix(prefix));
    let without: Vec<String> = without.map(str::to_owned).collect();
    let path = [plain.clone(), ["/v1", &plain].concat()]
        .into_iter()
        .chain(without)
        .find(|it| is_known(it))?;
    let query = uri.query().map(|query| ["?", query].concat()).unwrap_or_default();
    let mut canonical = uri.clone().into_parts();
    canonical.path_and_query = format!("{path}{query}").parse().ok();
    Uri::from_parts(canonical).ok()
}

impl Route {
    /// Whether this is the route of a path, for its method.
    fn has(&self, path: &str) -> bool {
        if let Some(before) = self.path.strip_suffix("{*id}") {
            return path.strip_prefix(before).is_some_and(|id| !id.is_empty());
        }
        let Some((before, after)) = self.path.split_once("{id}") else { return self.path == path };
        let id = path.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        id.is_some_and(|id| !id.is_empty() && !id.contains('/'))
    }
}

impl Shape {
    /// Error format of unknown paths.
    pub(super) fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/") && !path.starts_with("/api/v0/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_however_base_and_path_are_joined() {
        let canonical = |path: &str| canonical(&path.parse().unwrap()).map(|uri| uri.to_string());
        for (sent, expected) in [
            ("/v1//chat/completions", "/v1/chat/completions"),
            ("//v1/chat/completions/?a=b//c", "/v1/chat/completions?a=b//c"),
            ("/chat/completions", "/v1/chat/completions"),
            ("/embeddings", "/v1/embeddings"),
            ("/responses/resp_1", "/v1/responses/resp_1"),
            ("/responses/resp_1/input_items", "/v1/responses/resp_1/input_items"),
            ("/messages", "/v1/messages"),
            ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/api/v1/models", "/v1/models"),
            ("/openai/v1/completions", "/v1/completions"),
            ("/v1/api/chat", "/api/chat"),
            ("/v1/models/", "/v1/models"),
            ("/health/", "/health"),
        ] {
            assert_eq!(canonical(sent).as_deref(), Some(expected), "{sent}");
        }
        for as_it_is in
            ["/", "/v1/models", "/v1/models/org/name", "/api/chat", "/unknown", "/v2/x", "*"]
        {
            assert_eq!(canonical(as_it_is), None, "{as_it_is}");
        }
    }
}
