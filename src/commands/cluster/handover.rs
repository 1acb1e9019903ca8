//! `shardpack cluster export-controller|import-controller|handover`: a second controller, of which one
//! acts at a time.

use std::{fs, io::Write as _, path::Path, process::ExitCode, thread};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use shardpack_identity::{
    Candidate, Endpoint, ExportError, Member, SignedMandate, export_controller, import_controller,
};
use shardpack_transfer::protocol::{Feature, Timeouts};
use shardpack_transfer::receive::NodeClient;

use super::secret::{self, Wanted};
use crate::{
    args::{ClusterArgs, PassphraseChoice},
    cluster,
    commands::Outcome,
    failure::Failure,
    progress::{result, say},
};

const PASSPHRASE: Wanted = Wanted { what: "passphrase", question: "passphrase (not echoed): " };
const AGAIN: Wanted = Wanted { what: "passphrase", question: "the same once more: " };

/// Longest exported controller: hundreds of members take 100 KB.
const MAX_FILE_BYTES: u64 = 2 << 20;

/// Rounds in which a handover outbids another one that it races with; each leaves at most one of them
/// with a majority.
const MAX_ROUNDS: u32 = 5;

fn passphrase(choice: &PassphraseChoice, confirm: bool) -> Result<String, Failure> {
    let text = match &choice.passphrase_file {
        Some(path) => secret::read_file(PASSPHRASE, path)?,
        None => secret::read_stdin(PASSPHRASE)?,
    };
    let is_typed = choice.passphrase_file.is_none() && secret::is_terminal();
    if confirm && is_typed && secret::read_stdin(AGAIN)? != text {
        return Err(anyhow!("the two passphrases differ").into());
    }
    Ok(text)
}

fn explained(error: ExportError) -> Failure {
    let hint = match &error {
        ExportError::Short { .. } => "five or six random words are easy to write down",
        ExportError::Home(shardpack_identity::HomeError::Exists { .. }) => {
            "give another folder with --cluster"
        }
        _ => return error.into(),
    };
    Failure::from(error).hint(hint)
}

/// Writes the controller into a file.
pub(super) fn export(args: &ClusterArgs, file: &Path, choice: &PassphraseChoice) -> Outcome {
    let folder = cluster::folder(&args.cluster)?;
    if file.exists() {
        return Err(anyhow!("{} exists already", file.display()).into());
    }
    // One that was replaced, or imported and never used, may know fewer members.
    let members = cluster::open(&args.cluster)?.members().len();
    let bytes = export_controller(&folder, &passphrase(choice, true)?).map_err(explained)?;
    let shown = || format!("could not write {}", file.display());
    let parent = file.parent().filter(|it| !it.as_os_str().is_empty());
    // Of this user alone, and whole or not there.
    let mut partial =
        tempfile::NamedTempFile::new_in(parent.unwrap_or(Path::new("."))).with_context(shown)?;
    partial.write_all(&bytes).and_then(|()| partial.as_file().sync_all()).with_context(shown)?;
    partial.persist_noclobber(file).with_context(shown)?;
    if args.json {
        result(&json!({ "ok": true, "file": file, "members": members }).to_string());
    } else {
        result(&format!("{}: the controller of {members} members", file.display()));
        say("On the second machine: shardpack cluster import-controller FILE");
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the folder the controller in a file.
pub(super) fn import(args: &ClusterArgs, file: &Path, choice: &PassphraseChoice) -> Outcome {
    let folder = cluster::folder(&args.cluster)?;
    let shown = || format!("could not read {}", file.display());
    let size_bytes = fs::metadata(file).with_context(shown)?.len();
    if size_bytes > MAX_FILE_BYTES {
        let error = anyhow!("{}: {size_bytes} bytes are no exported controller", file.display());
        return Err(error.into());
    }
    let bytes = fs::read(file).with_context(shown)?;
    let imported = import_controller(&folder, &bytes, &passphrase(choice, false)?);
    let (cluster, members) = imported.map_err(explained)?;
    if args.json {
        let json = json!({ "ok": true, "cluster": cluster, "members": members, "folder": folder });
        result(&json.to_string());
    } else {
        result(&format!("cluster {cluster} with {members} members, in {}", folder.display()));
        say("It does not act yet: `shardpack cluster handover` takes over.");
    }
    Ok(ExitCode::SUCCESS)
}

/// What a member said.
struct Answer {
    /// Whether it accepts the mandate, or could.
    accepted: bool,
    /// Number of the mandate that it knows, 0 for none.
    epoch: u64,
}

/// Makes this folder's controller the one that acts.
pub(super) fn handover(args: &ClusterArgs, name: Option<&str>, force: bool) -> Outcome {
    let folder = cluster::folder(&args.cluster)?;
    let candidate = Candidate::new(&folder)?;
    let name = name.map_or_else(own_name, str::to_owned);
    let members = candidate.members().to_vec();
    let known = ask_all(&candidate, &members, |client| {
        let state = client.operate("controller.state", &Value::Null)?;
        Ok(Answer { accepted: true, epoch: state["epoch"].as_u64().unwrap_or(0) })
    });
    let suffices = |count: usize| force || members.is_empty() || 2 * count > members.len();
    // Asked of fewer, a mandate would only lock out the controller that acts.
    if !suffices(accepted(&known)) {
        return Err(without_majority(args, &members, &known));
    }
    let mut highest = highest(&known).max(candidate.epoch());
    let (mut mandate, mut told) = (None, Vec::new());
    for _ in 0..MAX_ROUNDS {
        let offered = candidate.mandate(highest + 1, &name)?;
        told = present(&candidate, &members, &offered)?;
        highest = self::highest(&told).max(highest + 1);
        if !suffices(accepted(&told)) {
            return Err(without_majority(args, &members, &told));
        }
        mandate = Some(offered);
        // A member that another controller claimed with the same number is outbid, by who has a
        // majority and nobody else.
        if told.iter().flatten().all(|answer| answer.accepted) {
            break;
        }
    }
    let mandate = mandate.context("no mandate was offered")?;
    let epoch = mandate.mandate().epoch;
    let home = candidate.keep(mandate)?;
    show(args, &members, &told, (epoch, home.cluster(), &name));
    Ok(ExitCode::SUCCESS)
}

fn highest(answers: &[Result<Answer, String>]) -> u64 {
    answers.iter().flatten().map(|answer| answer.epoch).max().unwrap_or(0)
}

fn accepted(answers: &[Result<Answer, String>]) -> usize {
    answers.iter().flatten().filter(|answer| answer.accepted).count()
}

fn present(
    candidate: &Candidate,
    members: &[Member],
    mandate: &SignedMandate,
) -> anyhow::Result<Vec<Result<Answer, String>>> {
    let parameters = serde_json::to_value(mandate)?;
    Ok(ask_all(candidate, members, |client| {
        let answer = client.operate("controller.present", &parameters)?;
        let epoch = answer["known"]["epoch"].as_u64().unwrap_or(0);
        Ok(Answer { accepted: answer["accepted"] == true, epoch })
    }))
}

/// Asks all members at the same time.
fn ask_all(
    candidate: &Candidate,
    members: &[Member],
    question: impl Fn(&mut NodeClient) -> anyhow::Result<Answer> + Sync,
) -> Vec<Result<Answer, String>> {
    let ask = |endpoint: Endpoint| -> anyhow::Result<Answer> {
        let mut client = NodeClient::connect(endpoint, Timeouts::default())?;
        client.require(Feature::Handover)?;
        question(&mut client)
    };
    thread::scope(|scope| {
        let ask = &ask;
        let asking: Vec<_> = members
            .iter()
            .map(|member| candidate.endpoint(member))
            .map(|endpoint| scope.spawn(|| ask(endpoint).map_err(|error| format!("{error:#}"))))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            // A panic here is ours, and goes on in the caller's thread.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        asking.into_iter().map(join).collect()
    })
}

/// The machine's name.
fn own_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "another machine".to_owned() } else { name }
}

fn without_majority(
    args: &ClusterArgs,
    members: &[Member],
    told: &[Result<Answer, String>],
) -> Failure {
    if !args.json {
        tell(members, told);
    }
    let (found, of) = (accepted(told), members.len());
    Failure::from(anyhow!(
        "{found} of {of} members accept this controller, more than half are needed: it does not act"
    ))
    .hint(
        "start the members that do not answer, or run it again if another handover ran at the same time; \
         --force takes over where most members are lost",
    )
}

fn tell(members: &[Member], told: &[Result<Answer, String>]) {
    for (member, answer) in members.iter().zip(told) {
        match answer {
            Ok(Answer { accepted: true, .. }) => {}
            Ok(Answer { epoch, .. }) => {
                say(&format!(
                    "{}: another controller has claimed epoch {epoch} there",
                    member.name
                ));
            }
            Err(problem) => say(&format!("{}: {problem}", member.name)),
        }
    }
}

fn show(
    args: &ClusterArgs,
    members: &[Member],
    told: &[Result<Answer, String>],
    (epoch, cluster, name): (u64, &str, &str),
) {
    if args.json {
        let member = |(member, answer): (&Member, &Result<Answer, String>)| match answer {
            Ok(answer) => json!({ "node": member.name, "accepted": answer.accepted }),
            Err(problem) => json!({ "node": member.name, "accepted": false, "error": problem }),
        };
        let nodes: Vec<Value> = members.iter().zip(told).map(member).collect();
        let json = json!({
            "ok": true, "cluster": cluster, "epoch": epoch, "controller": name, "nodes": nodes,
        });
        result(&json.to_string());
        return;
    }
    tell(members, told);
    result(&format!(
        "the controller on {name} acts for cluster {cluster} (epoch {epoch}); {} of {} members know",
        accepted(told),
        members.len()
    ));
    if accepted(told) < members.len() {
        say("the others learn of it when this machine reaches them next");
    }
}
