//! Handshakes within a time and a number of bytes, and their failures in plain words.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use rustls::{
    AlertDescription, CertificateError, Connection, Error, InvalidMessage, PeerIncompatible,
};

use crate::{Service, certificate::date, credentials::Mismatch};

/// Most bytes of the other side's handshake; ours have about one thousand.
const MAX_HANDSHAKE_BYTES: usize = 32 << 10;

/// Between two looks at whether the handshake is still wanted.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long to go on with a handshake.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    /// The moment by which it must be done.
    pub deadline: Instant,
    /// Whether it is not wanted any more.
    pub given_up: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    /// So long from now.
    #[must_use]
    pub fn of(timeout: Duration) -> Self {
        Self { deadline: Instant::now() + timeout, given_up: &|| false }
    }

    pub(crate) fn slice(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || (self.given_up)() {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(left.min(LOOK_AGAIN))
    }
}

/// A socket whose reads and writes end with the patience, however slowly bytes trickle.
pub(crate) struct Patiently<'a>(pub(crate) &'a TcpStream, pub(crate) Patience<'a>);

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Read for Patiently<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0.set_read_timeout(Some(self.1.slice()?))?;
            match (&mut &*self.0).read(into) {
                Err(error) if waits(&error) => {}
                result => return result,
            }
        }
    }
}

impl Write for Patiently<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.0.set_write_timeout(Some(self.1.slice()?))?;
            match (&mut &*self.0).write(bytes) {
                Err(error) if waits(&error) => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why two machines do not speak with each other. The sentences go on after the other side's
/// name, and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Too slow.
    #[error("it did not complete a handshake in time: is the program at that port a node?")]
    Timeout,
    /// It hung up.
    #[error(
        "it closed the connection during the handshake: a node has a limit of unproven callers, and a node without TLS closes at once"
    )]
    Closed,
    /// The socket failed.
    #[error("the connection failed during the handshake: {0}")]
    Io(io::Error),
    /// It sent more than any handshake has.
    #[error("it sent over {MAX_HANDSHAKE_BYTES} bytes of handshake")]
    TooLarge,
    /// Something else than TLS 1.3.
    #[error(
        "it does not speak TLS 1.3: a node on a loopback address speaks in the clear until it is started with --tls"
    )]
    NotTls,
    /// Its certificate is of another authority.
    #[error(
        "it belongs to another cluster than this machine's: join it anew (`shardpack node --reset`, then `shardpack cluster add`), or choose its cluster with --cluster"
    )]
    OtherCluster,
    /// Its certificate has ended.
    #[error("its certificate is no longer valid{}: say `shardpack cluster renew`; if it was made lately, the clock of one of the two machines is wrong", since(*.until))]
    Expired {
        /// Since when, in seconds since 1970, where that is known.
        until: Option<u64>,
    },
    /// Its certificate has not begun.
    #[error(
        "its certificate is not valid yet: the clocks of the two machines differ by days; set them and try again"
    )]
    NotYetValid,
    /// It is of the cluster, but not who it should be.
    #[error("{0}")]
    Mismatch(String),
    /// It has not joined.
    #[error(
        "it has not joined a cluster, or has left it: say the `shardpack cluster add` line that it printed when it started"
    )]
    NotJoined,
    /// It needs no token.
    #[error(
        "it is in a cluster already: if that is no longer wanted, end it and start it with --reset"
    )]
    AlreadyJoined,
    /// It knows another cluster.
    #[error(
        "it refused this machine's certificate as another cluster's: join it anew (`shardpack node --reset`, then `shardpack cluster add`), or choose its cluster with --cluster"
    )]
    RefusedCluster,
    /// It takes this machine's certificate for expired or early.
    #[error(
        "it refused this machine's certificate as expired or not yet valid: compare the clocks of the two machines, then say `shardpack cluster renew`"
    )]
    RefusedTime,
    /// This machine may not do that there.
    #[error(
        "it refused this machine's role: nodes take orders from the cluster's controllers alone"
    )]
    RefusedRole,
    /// It wants to see a certificate.
    #[error("it wants a certificate of its cluster: this machine is not in one")]
    CertificateRequired,
    /// Anything else.
    #[error("the handshake failed: {0}")]
    Tls(Error),
}

fn since(moment: Option<u64>) -> String {
    moment.map(|moment| format!(" since {}", date(moment))).unwrap_or_default()
}

impl HandshakeError {
    fn of_io(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Self::Timeout,
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io(error),
        }
    }

    fn of_tls(error: Error, service: Option<Service>) -> Self {
        match error {
            Error::AlertReceived(alert) => Self::of_alert(alert, service),
            Error::InvalidCertificate(problem) => Self::of_certificate(problem),
            Error::InvalidMessage(
                InvalidMessage::InvalidContentType
                | InvalidMessage::UnknownProtocolVersion
                | InvalidMessage::MessageTooLarge
                | InvalidMessage::InvalidEmptyPayload,
            )
            | Error::PeerIncompatible(
                PeerIncompatible::Tls13RequiredForQuic
                | PeerIncompatible::ServerDoesNotSupportTls12Or13
                | PeerIncompatible::SupportedVersionsExtensionRequired,
            ) => Self::NotTls,
            Error::NoApplicationProtocol if service == Some(Service::Join) => Self::AlreadyJoined,
            Error::PeerIncompatible(
                PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon,
            )
            | Error::NoCertificatesPresented => {
                Self::Mismatch("it showed no certificate".to_owned())
            }
            other => Self::Tls(other),
        }
    }

    fn of_certificate(problem: CertificateError) -> Self {
        match problem {
            CertificateError::Expired => Self::Expired { until: None },
            CertificateError::ExpiredContext { not_after, .. } => {
                Self::Expired { until: Some(not_after.as_secs()) }
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYetValid
            }
            CertificateError::Other(other) => {
                let text = other.0.to_string();
                match other.0.downcast_ref::<Mismatch>() {
                    Some(Mismatch::Key { .. }) => Self::Mismatch(format!(
                        "{text}: another node answers there; if the machine was set up anew, say `shardpack cluster remove` and `shardpack cluster add`"
                    )),
                    _ => Self::Mismatch(text),
                }
            }
            // An authority of the same id with another key is another cluster too.
            _ => Self::OtherCluster,
        }
    }

    fn of_alert(alert: AlertDescription, service: Option<Service>) -> Self {
        match alert {
            AlertDescription::NoApplicationProtocol if service == Some(Service::Join) => {
                Self::AlreadyJoined
            }
            AlertDescription::NoApplicationProtocol => Self::NotJoined,
            AlertDescription::UnknownCA | AlertDescription::DecryptError => Self::RefusedCluster,
            AlertDescription::CertificateExpired => Self::RefusedTime,
            AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
                Self::RefusedRole
            }
            AlertDescription::CertificateRequired => Self::CertificateRequired,
            AlertDescription::ProtocolVersion => Self::NotTls,
            other => Self::Tls(Error::AlertReceived(other)),
        }
    }
}

/// Carries a handshake to its end. What was asked for is said with `service`, by the caller.
pub(crate) fn drive(
    socket: &TcpStream,
    session: &mut Connection,
    patience: Patience<'_>,
    service: Option<Service>,
) -> Result<(), HandshakeError> {
    let mut stream = Patiently(socket, patience);
    let mut heard = 0;
    loop {
        while session.wants_write() {
            session.write_tls(&mut stream).map_err(HandshakeError::of_io)?;
        }
        if !session.is_handshaking() {
            return Ok(());
        }
        heard += hear(&mut stream, session, service)?;
        if heard > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::TooLarge);
        }
    }
}

/// Takes what came and works on it. A refusal is told to the other side.
fn hear(
    stream: &mut Patiently<'_>,
    session: &mut Connection,
    service: Option<Service>,
) -> Result<usize, HandshakeError> {
    let count = session.read_tls(stream).map_err(HandshakeError::of_io)?;
    if count == 0 {
        return Err(HandshakeError::Closed);
    }
    session.process_new_packets().map_err(|error| {
        // The other side may not listen any more.
        while session.wants_write() && session.write_tls(stream).is_ok() {}
        HandshakeError::of_tls(error, service)
    })?;
    Ok(count)
}

/// The answering side's first byte: the caller's certificate was accepted. TLS 1.3 lets a caller
/// believe itself connected before that.
pub(crate) const WELCOME: u8 = 1;

/// Waits for the welcome.
pub(crate) fn await_welcome(
    socket: &TcpStream,
    session: &mut Connection,
    patience: Patience<'_>,
    service: Service,
) -> Result<(), HandshakeError> {
    let mut stream = Patiently(socket, patience);
    let mut heard = 0;
    loop {
        let mut word = [0];
        match session.reader().read(&mut word) {
            Ok(1) if word[0] == WELCOME => return Ok(()),
            Ok(1) => return Err(HandshakeError::NotTls),
            Ok(_) => return Err(HandshakeError::Closed),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(HandshakeError::of_io(error)),
        }
        heard += hear(&mut stream, session, Some(service))?;
        if heard > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::TooLarge);
        }
    }
}
