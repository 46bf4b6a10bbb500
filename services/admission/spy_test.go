package admission

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/authentication/user"
)

// spy records the attributes that a plugin reads, beside resource, subresource, kind, namespace and operation. A plugin
// that reads nothing else, changes nothing and rejects nothing cannot have acted on the object. It can only have acted
// on the state of the cluster, and the fixtures vary that.
type spy struct {
	admission.Attributes
	mu    sync.Mutex
	reads map[string]bool
}

func (s *spy) read(field string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads[field] = true
}

func (s *spy) GetName() string { s.read("name"); return s.Attributes.GetName() }

func (s *spy) GetObject() runtime.Object { s.read("object"); return s.Attributes.GetObject() }

func (s *spy) GetOldObject() runtime.Object { s.read("old"); return s.Attributes.GetOldObject() }

func (s *spy) GetOperationOptions() runtime.Object {
	s.read("options")
	return s.Attributes.GetOperationOptions()
}

func (s *spy) IsDryRun() bool { s.read("dryRun"); return s.Attributes.IsDryRun() }

func (s *spy) GetUserInfo() user.Info { s.read("user"); return s.Attributes.GetUserInfo() }

func (s *spy) AddAnnotation(k, v string) error {
	s.read("annotation")
	return s.Attributes.AddAnnotation(k, v)
}

func (s *spy) AddAnnotationWithLevel(k, v string, l auditinternal.Level) error {
	s.read("annotation")
	return s.Attributes.AddAnnotationWithLevel(k, v, l)
}

func (s *spy) GetReinvocationContext() admission.ReinvocationContext {
	s.read("reinvocation")
	return s.Attributes.GetReinvocationContext()
}
