package storage

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
)

// Etcd is an etcd: its client, its event log and the prefix of its keys. Each etcd has revisions, an epoch and an event
// log of its own.
type Etcd struct {
	Client *etcdkubernetes.Client
	// Log identifies the etcd's event log.
	Log     eventlog.LogID
	Servers []string

	prefix string
	// latestRevision is the latest revision that a GET has returned.
	latestRevision atomic.Int64
}

// ReadRevision returns etcd's revision with a linearizable read of a key that is absent.
func (e *Etcd) ReadRevision(ctx context.Context) (int64, error) {
	resp, err := e.Client.Client.Get(ctx, e.OwnKey(absentKey))
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}

// connectionTimeout bounds ConnectionError.
const connectionTimeout = 2 * time.Second

// ConnectionError returns why the client has no connection. It is nil if the client has a connection.
func (e *Etcd) ConnectionError(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectionTimeout)
	defer cancel()
	// unlike other calls of the client, it does not wait for a connection
	maintenance := etcdserverpb.NewMaintenanceClient(e.Client.Client.ActiveConnection())
	_, err := maintenance.Status(ctx, &etcdserverpb.StatusRequest{})
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		return nil
	}
	return errors.New(status.Convert(err).Message())
}

// absentKey is the name of an own key that no process writes.
const absentKey = "nothing"

// Prefix returns the prefix of all keys, such as "/registry/".
func (e *Etcd) Prefix() string { return e.prefix }

// OwnKey returns the etcd key of Watershed's own state with a name. The key is under the prefix, so control planes with
// different prefixes share an etcd, and etcd's RBAC can grant the prefix alone. kube-apiserver ignores the key, and no
// resource has it, because the group of a CRD has a dot.
func (e *Etcd) OwnKey(name string) string { return e.prefix + "watershed/" + name }
