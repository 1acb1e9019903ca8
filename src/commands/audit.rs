//! `shardpack audit`: audit logs of servers.

use std::process::ExitCode;

use serde_json::json;
use shardpack_server::{AuditSummary, verify_audit};

use super::Outcome;
use crate::{
    args::{AuditAction, AuditArgs},
    failure::Failure,
    progress::result,
};

/// Runs the command.
pub(crate) fn run(args: &AuditArgs) -> Outcome {
    let AuditAction::Verify { files, json: is_json } = &args.action;
    let AuditSummary { lines, requests, seq: [first, last], head } =
        verify_audit(files).map_err(|fault| {
            // A file that is not there says nothing of its lines.
            if fault.line == 0 {
                Failure::from(anyhow::Error::from(fault))
            } else {
                Failure::wrong(fault)
            }
        })?;
    result(&if *is_json {
        json!({
            "ok": true, "lines": lines, "requests": requests, "first": first, "last": last,
            "head": head,
        })
        .to_string()
    } else {
        format!(
            "audit: {lines} lines ({first} to {last}), {requests} requests, unchanged; head {head}"
        )
    });
    Ok(ExitCode::SUCCESS)
}

/// Whether the result is printed as JSON.
pub(crate) const fn json(args: &AuditArgs) -> bool {
    let AuditAction::Verify { json, .. } = &args.action;
    *json
}
