package authz

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/watchable"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// heartbeat is the period of heartbeats on a stream of policy revisions. It is well below identity.PolicyRevisionLease.
const heartbeat = time.Second

// maxChanges bounds the changes that a slow stream can still receive individually. Beyond that it receives a single
// revision for everything.
const maxChanges = 4096

// policyRevisions numbers the policy changes that this replica has received, in its own order, with their namespace.
type policyRevisions struct {
	replica string

	mu      sync.Mutex
	count   uint64
	recent  []*authzv1.PolicyRevision // the newest last
	changed watchable.Signal
}

func newPolicyRevisions() *policyRevisions {
	return &policyRevisions{replica: rand.Text(), count: 1}
}

// record records a policy change of a namespace; an empty namespace means all users. revokes reports whether the change
// may revoke a permission.
func (g *policyRevisions) record(namespace string, revokes bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.count++
	g.recent = append(g.recent, &authzv1.PolicyRevision{
		Revision:  g.count,
		Replica:   g.replica,
		Namespace: namespace,
		MayRevoke: revokes,
	})
	if len(g.recent) > maxChanges {
		g.recent = append([]*authzv1.PolicyRevision(nil), g.recent[maxChanges/2:]...)
	}
	g.changed.Notify()
}

func (g *policyRevisions) current() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.count
}

// after returns the changes after a revision. If they are no longer all known, it returns reset instead, which covers
// everything.
func (g *policyRevisions) after(
	count uint64) (changes []*authzv1.PolicyRevision, reset *authzv1.PolicyRevision, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := int(g.count - count)
	if n > len(g.recent) {
		return nil, &authzv1.PolicyRevision{Revision: g.count, Replica: g.replica, MayRevoke: true}, g.changed.C()
	}
	return g.recent[len(g.recent)-n:], nil, g.changed.C()
}

// eventHandler returns a handler that records the changes of RBAC objects.
func (g *policyRevisions) eventHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { g.record(affectedNamespace(obj), false) },
		UpdateFunc: func(old, newer any) {
			if resourceVersion(old) != resourceVersion(newer) { // a resync changes nothing
				g.record(affectedNamespace(newer), true)
			}
		},
		DeleteFunc: func(obj any) { g.record(affectedNamespace(obj), true) },
	}
}

// affectedNamespace returns the namespace whose decisions an RBAC object affects. A Role or RoleBinding affects only
// its own; the result is empty for all others.
func affectedNamespace(obj any) string {
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}
	switch o := obj.(type) {
	case *rbacv1.Role:
		return o.Namespace
	case *rbacv1.RoleBinding:
		return o.Namespace
	}
	return ""
}

func resourceVersion(obj any) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return ""
	}
	return m.GetResourceVersion()
}

// PolicyRevisions implements authzv1.AuthzServer. The stream ends when the policies are not fresh, because the gateway
// must not use its cached decisions then.
func (s *Service) PolicyRevisions(_ *authzv1.PolicyRevisionsRequest,
	stream grpc.ServerStreamingServer[authzv1.PolicyRevision]) error {
	ctx := stream.Context()
	g := s.policyRevisions
	if err := s.checkFresh(); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	sent := g.current()
	if err := stream.Send(&authzv1.PolicyRevision{
		Revision:         sent,
		Replica:          g.replica,
		MayRevoke:        true,
		RejectsAnonymous: s.rejectsAnonymous,
	}); err != nil {
		return err
	}
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		if err := s.checkFresh(); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
		changes, reset, changed := g.after(sent)
		if reset != nil {
			changes = []*authzv1.PolicyRevision{reset}
		}
		for _, c := range changes {
			if err := stream.Send(c); err != nil {
				return err
			}
			sent = c.Revision
		}
		select {
		case <-changed:
		case <-ticker.C:
			if err := stream.Send(&authzv1.PolicyRevision{
				Revision:  sent,
				Replica:   g.replica,
				Heartbeat: true,
			}); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
