//! Tests that start the program: real processes, files, sockets and kills. One target, so one link.
#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

mod adapters;
mod api_requests;
mod bad_input;
mod calibrate;
mod closed_output;
mod cluster;
mod cluster_view;
mod controllers;
mod convert;
mod custom_rules;
mod demo;
mod distillation;
mod doctor;
#[path = "../harness/documents.rs"]
mod documents;
mod eval;
mod export;
mod fairness;
mod fronts;
mod fused_projections;
mod guide;
#[path = "../harness/program.rs"]
mod harness;
#[cfg(feature = "hub")]
mod hub;
mod idle;
mod kill;
mod launchd;
mod memory_plan;
mod mlx;
#[cfg(feature = "hub")]
mod model_command;
mod models_on_nodes;
#[path = "../package_set.rs"]
mod package_set;
mod pipeline_stages;
#[path = "../harness/ports.rs"]
mod ports;
mod prompt_values;
mod push;
mod recovery;
mod reference_docs;
mod reshard;
#[path = "../harness/running.rs"]
mod running;
mod sandbox;
mod scripted_engine;
mod serve;
mod server_stats;
#[path = "../harness/sets.rs"]
mod sets;
mod several_models;
mod shell;
mod signature;
#[path = "../harness/skip.rs"]
mod skip;
mod source_formats;
mod speculative_decoding;
mod store;
mod streaming;
mod tenants;
mod tool_calls;
mod upgrade;
mod verify;
mod vision_language;
