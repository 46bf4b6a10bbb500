// Package customresources serves the resources of CustomResourceDefinitions (CRDs) with the verbs of built-in
// resources. It has their discovery entries, storages, conversions and OpenAPI documents.
//
// Set has a lock, and all goroutines may use it. An informer's goroutine updates it through Handler. CRDs belongs to
// the goroutine of the publisher's term.
//
// # Review notes
//
//   - An older state of a CRD must not replace a newer state, and must not restore a deleted CRD. EpochChanged is the
//     only exception: revisions of a restored etcd can be lower.
//   - A lookup that fails must read etcd, because another registry's informer may be ahead of this registry's.
//   - Storages and schemas are built on first use. The informer's handler must not build them.
//   - The publisher must not call a webhook: it reads each object in its stored version.
package customresources

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/crd"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
)

// Set holds every CRD whose names are accepted. Expensive parts of a CRD are built on first use.
type Set struct {
	Storage *storage.Storage
	// Converters call the conversion webhooks of CRDs.
	Converters *crd.Converters
	// Models are the schemas that every object refers to, such as ObjectMeta.
	Models map[string]*spec.Schema
	// BuiltIn reports whether the built-in APIs have a group. As in kube-apiserver, no path of a CRD in such a group is
	// served. Otherwise a CRD could have the name of a built-in resource in the event log, or its keys in etcd.
	BuiltIn func(group string) bool
	// OnChange is called after a CRD has changed.
	OnChange func()
	// Fresh reports whether the set has all changes of CRDs. If it has not, requests compare their CRD with etcd: a
	// read under an older definition lacks new fields, and an update by it would remove them.
	Fresh func() bool

	mu     sync.RWMutex
	byName map[string]*servedCRD
	// removedAt is the last known revision of each CRD's deletion. An older state does not restore the CRD.
	removedAt map[string]uint64
}

// servedCRD is a CRD that the registry serves. These are its states:
//
//	             names accepted          Established         deleted
//	(not served) --------------> hidden ------------> listed --------> terminating
//	     ^                          |                    |                  |
//	     +--------------------------+-- removed from etcd +------------------+
//
// The registry serves requests in each state except the first. Discovery lists the CRD's resources once the CRD is
// established. The resources of a terminating CRD have no create, patch and update in discovery, and their creates are
// forbidden.
//
// EpochChanged sets otherEpoch in any state. The next state that is read then replaces the CRD.
type servedCRD struct {
	*crd.CRD
	// otherEpoch is set if the revision belongs to another epoch of etcd. Any state that is read now is newer.
	otherEpoch      bool
	storageResource *storage.Resource
	apiResources    []*registryv1.APIResource
	*servingInfo
}

// servingInfo holds the expensive parts of a CRD. They are built on first use, and reused if only conditions of the CRD
// change.
type servingInfo struct {
	once     sync.Once
	versions map[string]*servedVersion
	builder  *builder
	err      error
	docs     documents
	// inputs identifies the inputs of the CRD's OpenAPI documents.
	inputs string
}

// servedVersion holds the storages and scopes of a version.
type servedVersion struct {
	storage customresource.CustomResourceStorage
	scopes  map[string]*handlers.RequestScope // by subresource
}

// Handler returns the event handler for an informer of CRDs.
func (t *Set) Handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { t.set(obj.(*apiextensionsv1.CustomResourceDefinition)) },
		UpdateFunc: func(_, obj any) { t.set(obj.(*apiextensionsv1.CustomResourceDefinition)) },
		DeleteFunc: func(obj any) {
			// a list did not contain the CRD: obj has an older revision than the deletion
			tombstone, unknown := obj.(cache.DeletedFinalStateUnknown)
			if unknown {
				obj = tombstone.Obj
			}
			if d, ok := obj.(*apiextensionsv1.CustomResourceDefinition); ok {
				t.remove(d, !unknown)
			}
		},
	}
}

// Updated applies a CRD that this registry has updated, before the informer receives the update. A client that has
// updated a CRD then writes objects under the new schema.
func (t *Set) Updated(obj runtime.Object) {
	d, err := convertToV1(obj.DeepCopyObject())
	if err != nil {
		slog.Error("An updated CustomResourceDefinition was not read", "error", err)
		return
	}
	t.set(d)
}

// remove removes a CRD as of d's revision. A CRD that is known at a later revision stays. known reports whether d's
// revision is the deletion's. In that case, older states do not restore the CRD.
func (t *Set) remove(d *apiextensionsv1.CustomResourceDefinition, known bool) {
	revision, err := storage.Revision(d)
	if err != nil {
		return
	}
	t.mu.Lock()
	old := t.byName[d.Name]
	if known && (old == nil || !old.otherEpoch) {
		if t.removedAt == nil {
			t.removedAt = map[string]uint64{}
		}
		t.removedAt[d.Name] = max(t.removedAt[d.Name], revision)
	}
	removed := old != nil && (old.otherEpoch || !newer(old.CustomResourceDefinition, d))
	if removed {
		delete(t.byName, d.Name)
	}
	t.mu.Unlock()
	if removed {
		t.OnChange()
	}
}

// EpochChanged marks all CRDs as from another epoch of etcd, for example after a restored backup. Any state that is
// read from now on replaces a marked CRD, even at a lower revision.
func (t *Set) EpochChanged() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removedAt = nil
	for name, s := range t.byName {
		known := *s
		known.otherEpoch = true
		t.byName[name] = &known
	}
}

func (t *Set) set(d *apiextensionsv1.CustomResourceDefinition) *servedCRD {
	if !servable(d) {
		t.remove(d, true)
		return nil
	}
	revision, err := storage.Revision(d)
	if err != nil {
		return nil
	}
	t.mu.Lock()
	if revision < t.removedAt[d.Name] {
		t.mu.Unlock()
		return nil
	}
	if t.byName == nil {
		t.byName = map[string]*servedCRD{}
	}
	old := t.byName[d.Name]
	if old != nil && !old.otherEpoch &&
		(newer(old.CustomResourceDefinition, d) || old.ResourceVersion == d.ResourceVersion) {
		t.mu.Unlock()
		return old
	}
	var s *servedCRD
	if old != nil && crd.Same(old.CustomResourceDefinition, d) { // only conditions changed: keep servingInfo
		crdInfo := *old.CRD
		crdInfo.CustomResourceDefinition = d
		s = &servedCRD{CRD: &crdInfo, storageResource: old.storageResource, servingInfo: old.servingInfo}
	} else {
		crdInfo, err := crd.New(d)
		if err != nil {
			t.mu.Unlock()
			slog.Warn("A CustomResourceDefinition cannot be served", "name", d.Name, "error", err)
			t.remove(d, true)
			return nil
		}
		s = &servedCRD{
			CRD:             crdInfo,
			storageResource: storageResourceOf(t.Storage, crdInfo),
			servingInfo: &servingInfo{
				inputs: fmt.Sprintf("%s %d %v;", d.UID, d.Generation, d.Status.AcceptedNames),
			},
		}
	}
	if !t.BuiltIn(d.Spec.Group) {
		s.apiResources = apiResourcesOf(s.CRD, s.storageResource)
	}
	t.byName[d.Name] = s
	t.mu.Unlock()
	t.OnChange()
	return s
}

// newer reports whether a is a later state of a CRD than b.
func newer(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	av, aerr := storage.Revision(a)
	bv, berr := storage.Revision(b)
	return aerr == nil && berr == nil && av > bv
}

// servable reports whether a CRD's names are accepted. The registry serves the CRD from then on. Discovery lists it
// once it is established.
func servable(d *apiextensionsv1.CustomResourceDefinition) bool {
	return apihelpers.IsCRDConditionTrue(d, apiextensionsv1.NamesAccepted) ||
		apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established)
}

// get returns a CRD. It reads a CRD that the set lacks from etcd, because another registry may have received it
// earlier. If the set is not fresh, it also reads a CRD that etcd has at another revision.
func (t *Set) get(ctx context.Context, name string) (*servedCRD, error) {
	if s := t.crd(name); s != nil && !s.otherEpoch {
		if t.Fresh() {
			return s, nil
		}
		err := t.definition(s).Confirm(ctx, t.Storage.Client.Client)
		if !errors.Is(err, storage.ErrDefinitionChanged) {
			return s, err
		}
	}
	return t.refresh(ctx, name)
}

// definition returns the key and the revision of a CRD.
func (t *Set) definition(s *servedCRD) *storage.Definition {
	crds, _ := t.Storage.ByName(crdResource)
	revision, _ := storage.Revision(s) // set has parsed it
	return &storage.Definition{Key: crds.Prefix + s.Name, Revision: int64(revision)}
}

// refresh reads a CRD from etcd and updates the set. It returns nil if etcd has no servable CRD of this name. An etcd
// that has the CRD at an earlier revision than the set had before has been restored.
func (t *Set) refresh(ctx context.Context, name string) (*servedCRD, error) {
	before := t.lastRevision(name)
	d, err := ReadCRD(ctx, t.Storage, name)
	if err != nil || d == nil {
		return nil, err
	}
	if revision, err := storage.Revision(d); err == nil && revision < before {
		t.EpochChanged()
	}
	return t.set(d), nil
}

// lastRevision returns the last revision of a CRD or of its deletion that the set has received in this epoch, or 0.
func (t *Set) lastRevision(name string) uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	last := t.removedAt[name]
	if s := t.byName[name]; s != nil && !s.otherEpoch {
		if revision, err := storage.Revision(s); err == nil {
			last = max(last, revision)
		}
	}
	return last
}

// RequestScope returns the scope that serves r and its definition, or nil.
func (t *Set) RequestScope(ctx context.Context, r *commonv1.Resource) (*handlers.RequestScope, *storage.Definition,
	error) {
	if r.GetGroup() == "" {
		return nil, nil, nil
	}
	name := r.GetResource() + "." + r.GetGroup()
	s, err := t.get(ctx, name)
	if err == nil && s != nil && !s.serves(r) { // another registry may have a later state
		s, err = t.refresh(ctx, name)
	}
	if err != nil || s == nil || !s.serves(r) {
		return nil, nil, err
	}
	if err := s.buildOnce(t); err != nil {
		slog.Error("A custom resource cannot be served", "name", s.Name, "error", err)
		return nil, nil, apierrors.NewInternalError(errors.New("error resolving resource"))
	}
	if s.UsesWebhook() {
		scope, err := s.builder.requestScopeFor(ctx, r)
		return scope, t.definition(s), err
	}
	return s.versions[r.GetVersion()].scopes[r.GetSubresource()], t.definition(s), nil
}

// Refresh reads the CRD of a resource from etcd. It returns false if etcd has no servable CRD.
func (t *Set) Refresh(ctx context.Context, r *commonv1.Resource) (served bool, err error) {
	s, err := t.refresh(ctx, r.GetResource()+"."+r.GetGroup())
	return s != nil, err
}

// serves reports whether the CRD serves a resource or subresource in a version.
func (s *servedCRD) serves(r *commonv1.Resource) bool {
	return slices.ContainsFunc(s.apiResources, func(apiResource *registryv1.APIResource) bool {
		return apiResource.Resource.Version == r.GetVersion() && apiResource.Resource.Subresource == r.GetSubresource()
	})
}

// RefreshIfOlder reads a CRD from etcd if the set has it at an older revision than revision.
func (t *Set) RefreshIfOlder(ctx context.Context, name string, revision int64) error {
	s := t.crd(name)
	if revision == 0 || s == nil {
		return nil
	}
	if known, err := storage.Revision(s); err == nil && !s.otherEpoch && known >= uint64(revision) {
		return nil
	}
	_, err := t.refresh(ctx, name)
	return err
}

// StorageResource returns the stored resource of a CRD's objects, after it has read the CRD from etcd. It returns nil
// if the CRD is not servable.
func (t *Set) StorageResource(ctx context.Context, name string) (*storage.Resource, error) {
	s, err := t.refresh(ctx, name)
	if err != nil || s == nil {
		return nil, err
	}
	return s.storageResource, nil
}

// crd returns a CRD of the set by its name, or nil.
func (t *Set) crd(name string) *servedCRD {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byName[name]
}

// GetCustomResourceListerCollectionDeleter implements finalizer.CRClientGetter. The finalizer deletes a CRD's objects
// before the CRD.
func (t *Set) GetCustomResourceListerCollectionDeleter(
	d *apiextensionsv1.CustomResourceDefinition) (finalizer.ListerCollectionDeleter, error) {
	s := t.crd(d.Name)
	if s == nil || s.UID != d.UID {
		return nil, apierrors.NewNotFound(schema.GroupResource{
			Group:    apiextensionsv1.GroupName,
			Resource: "customresourcedefinitions",
		}, d.Name)
	}
	return objectDeleter{t, s}, nil
}

// all returns every CRD, by group and name.
func (t *Set) all() []*servedCRD {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var all []*servedCRD
	for _, s := range t.byName {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *servedCRD) int {
		return cmp.Or(strings.Compare(a.Spec.Group, b.Spec.Group), strings.Compare(a.Name, b.Name))
	})
	return all
}

// APIResources returns the discovery entries of all CRDs.
func (t *Set) APIResources() []*registryv1.APIResource {
	var all []*registryv1.APIResource
	for _, s := range t.all() {
		all = append(all, s.apiResources...)
	}
	return all
}
