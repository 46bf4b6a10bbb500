package eventlog

import "strings"

// LogID identifies the event log of an etcd. Each log has a stream and subjects of its own.
type LogID string

// Main is the log of the main etcd (--etcd-servers).
const Main LogID = ""

const (
	subjectRoot  = "watershed."
	otherSubject = "watershed.log."
)

// Stream returns the name of the log's stream.
func (l LogID) Stream() string {
	if l == Main {
		return StreamName
	}
	return StreamName + "_" + string(l)
}

// Subject returns the log's subject for a subject of the main log.
func (l LogID) Subject(main string) string {
	if l == Main {
		return main
	}
	return otherSubject + string(l) + "." + strings.TrimPrefix(main, subjectRoot)
}
