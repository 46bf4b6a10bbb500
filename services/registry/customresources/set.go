// Package customresources serves what CustomResourceDefinitions define, with the verbs that serve everything else:
// which resources there are, how their objects are read, stored and converted, and what OpenAPI says of them.
package customresources

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/crd"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
)

// Set is every definition that can be served. What takes long to build is built when it is first asked for.
type Set struct {
	Storage *storage.Storage
	// Converters call the webhooks of definitions that have one.
	Converters *crd.Converters
	// Models are the schemas that every object has parts of: ObjectMeta and the like.
	Models map[string]*spec.Schema
	// OnChange is called after any definition has.
	OnChange func()

	mu     sync.RWMutex
	byName map[string]*servedCRD
	// removedAt is the revision at which a definition was last known to go: what is read of it from before does not bring
	// it back.
	removedAt map[string]uint64
}

// servedCRD is one definition.
type servedCRD struct {
	*crd.CRD
	// otherEpoch: its revision is of another history of etcd, and whatever is read now is newer.
	otherEpoch      bool
	storageResource *storage.Resource
	apiResources    []*registryv1.APIResource
	*servingInfo
}

// servingInfo is what takes long: it is built when it is first asked for, and stands while nothing but conditions change.
type servingInfo struct {
	once     sync.Once
	versions map[string]*servedVersion
	builder  *builder
	err      error
	docs     documents
}

// servedVersion is how requests in one version are served.
type servedVersion struct {
	storage customresource.CustomResourceStorage
	scopes  map[string]*handlers.RequestScope // by subresource
}

// Handler follows an informer of definitions.
func (t *Set) Handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { t.set(obj.(*apiextensionsv1.CustomResourceDefinition)) },
		UpdateFunc: func(_, obj any) { t.set(obj.(*apiextensionsv1.CustomResourceDefinition)) },
		DeleteFunc: func(obj any) {
			// a list found it gone: its revision is not its deletion's
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

// remove forgets a definition as of d's revision; what is known of a later one stays. known says that it went at that
// revision, so that what is read of it from before does not bring it back.
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

// EpochChanged says that etcd has another history, as after a backup was restored: what is read from now on is newer
// than what is known, whatever its revision.
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
	if !Servable(d) {
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
	if old != nil && crd.Same(old.CustomResourceDefinition, d) { // nothing but its conditions: what was built stands
		crdInfo := *old.CRD
		crdInfo.CustomResourceDefinition = d
		s = &servedCRD{CRD: &crdInfo, storageResource: old.storageResource, servingInfo: old.servingInfo}
	} else {
		crdInfo, err := crd.New(d)
		if err != nil {
			t.mu.Unlock()
			slog.Warn("A definition cannot be served", "name", d.Name, "error", err)
			t.remove(d, true)
			return nil
		}
		s = &servedCRD{
			CRD:             crdInfo,
			storageResource: StorageResourceOf(t.Storage, crdInfo),
			servingInfo:     &servingInfo{},
		}
	}
	s.apiResources = apiResourcesOf(s.CRD, s.storageResource)
	t.byName[d.Name] = s
	t.mu.Unlock()
	t.OnChange()
	return s
}

// newer says whether a is a later state than b of the same definition.
func newer(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	av, aerr := storage.Revision(a)
	bv, berr := storage.Revision(b)
	return aerr == nil && berr == nil && av > bv
}

// Servable says whether a definition's names are accepted; it is served from then on, and told of once it is
// established.
func Servable(d *apiextensionsv1.CustomResourceDefinition) bool {
	return apihelpers.IsCRDConditionTrue(d, apiextensionsv1.NamesAccepted) ||
		apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established)
}

// get finds a definition. One that this registry has not heard of is looked for in etcd: another one may have.
func (t *Set) get(ctx context.Context, name string) (*servedCRD, error) {
	if s := t.crd(name); s != nil {
		return s, nil
	}
	return t.refresh(ctx, name)
}

// refresh is a definition as etcd has it now; nil where there is none to serve.
func (t *Set) refresh(ctx context.Context, name string) (*servedCRD, error) {
	d, err := ReadCRD(ctx, t.Storage, name)
	if err != nil || d == nil {
		return nil, err
	}
	return t.set(d), nil
}

// RequestScope finds what answers requests for r; nil where nothing does.
func (t *Set) RequestScope(ctx context.Context, r *commonv1.Resource) (*handlers.RequestScope, error) {
	if r.GetGroup() == "" {
		return nil, nil
	}
	name := r.GetResource() + "." + r.GetGroup()
	s, err := t.get(ctx, name)
	if err == nil && s != nil && !s.serves(r) { // the gateway has heard of it from another registry
		s, err = t.refresh(ctx, name)
	}
	if err != nil || s == nil || !s.serves(r) {
		return nil, err
	}
	s.once.Do(func() { s.build(t) })
	if s.err != nil {
		slog.Error("A custom resource cannot be served", "name", s.Name, "error", s.err)
		return nil, apierrors.NewInternalError(errors.New("error resolving resource"))
	}
	if s.UsesWebhook() {
		return s.builder.requestScopeFor(ctx, r)
	}
	return s.versions[r.GetVersion()].scopes[r.GetSubresource()], nil
}

// serves says whether the definition serves a resource or subresource in a version.
func (s *servedCRD) serves(r *commonv1.Resource) bool {
	return slices.ContainsFunc(s.apiResources, func(apiResource *registryv1.APIResource) bool {
		return apiResource.Resource.Version == r.GetVersion() && apiResource.Resource.Subresource == r.GetSubresource()
	})
}

// RefreshIfOlder sees to it that a definition is not used as it was before a revision.
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

// StorageResource finds how a definition's objects are read, as the definition is now in etcd.
func (t *Set) StorageResource(ctx context.Context, name string) (*storage.Resource, error) {
	s, err := t.refresh(ctx, name)
	if err != nil || s == nil {
		return nil, err
	}
	return s.storageResource, nil
}

// crd finds a definition that this registry has heard of, by its resource's name; nil where there is none.
func (t *Set) crd(name string) *servedCRD {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byName[name]
}

// GetCustomResourceListerCollectionDeleter implements finalizer.CRClientGetter: a deleted definition's objects go
// first.
func (t *Set) GetCustomResourceListerCollectionDeleter(
	d *apiextensionsv1.CustomResourceDefinition) (finalizer.ListerCollectionDeleter, error) {
	s := t.crd(d.Name)
	if s == nil || s.UID != d.UID {
		return nil, apierrors.NewNotFound(schema.GroupResource{
			Group:    apiextensionsv1.GroupName,
			Resource: "customresourcedefinitions",
		}, d.Name)
	}
	s.once.Do(func() { s.build(t) })
	if s.err != nil {
		return nil, s.err
	}
	return s.versions[s.StorageVersion].storage.CustomResource, nil
}

// all is every definition, by group and name.
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

// APIResources is what the catalog says of the definitions.
func (t *Set) APIResources() []*registryv1.APIResource {
	var all []*registryv1.APIResource
	for _, s := range t.all() {
		all = append(all, s.apiResources...)
	}
	return all
}
