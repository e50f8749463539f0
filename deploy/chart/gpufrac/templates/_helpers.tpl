{{- /* Names and what several templates share. The release's name is in none: a node has one gpufrac. */ -}}
{{- define "gpufrac.image" -}}
{{ required "image.repository: name where your image of gpufrac is, such as registry.example/team/gpufrac" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "gpufrac.labels" -}}
app.kubernetes.io/name: gpufrac
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* "" or "-<pool>". */ -}}
{{- define "gpufrac.suffix" -}}
{{ if ne . "default" }}-{{ . }}{{ end }}
{{- end }}

{{- /* The NodeConfig of a pool: what the chart sets, and over it what the pool's values say. Takes (root, config). */ -}}
{{- define "gpufrac.config" -}}
{{- $root := index . 0 -}}
{{- $host := ternary "0.0.0.0" "127.0.0.1" (eq $root.Values.metrics.expose "pod") -}}
{{- $base := dict "apiVersion" "gpufrac.dev/v1" "kind" "NodeConfig" -}}
{{- $_ := set $base "metrics" (dict "address" (printf "%s:%v" $host $root.Values.metrics.port)) -}}
{{- $_ := set $base "kubelet" (dict "root" $root.Values.kubeletRoot) -}}
{{- if $root.Values.kubernetes.enabled }}{{ $_ := set $base "kubernetes" (dict "access" "in-cluster") }}{{ end -}}
{{- if $root.Values.kai.enabled -}}
{{- $annotations := dict "gpus" (dict "include" $root.Values.kai.gpus) "share" $root.Values.kai.share "criSocket" (include "gpufrac.criSocket" $root) -}}
{{- $_ := set $base "annotations" $annotations -}}
{{- end -}}
{{- toYaml (mergeOverwrite $base (deepCopy (index . 1))) -}}
{{- end }}

{{- define "gpufrac.criSocket" -}}
{{- get (dict "containerd" "/run/containerd/containerd.sock" "crio" "/run/crio/crio.sock" "k3s" "/run/k3s/containerd/containerd.sock") .Values.runtime -}}
{{- end }}

{{- /* Which nodes are of a pool: those whose label names it; for `default` all whose label names no other. */ -}}
{{- define "gpufrac.affinity" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $others := without (keys $root.Values.pools | sortAlpha) "default" -}}
{{- if or (ne $pool "default") $others }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: gpufrac.dev/pool
              operator: {{ ternary "NotIn" "In" (eq $pool "default") }}
              values: {{ ternary $others (list $pool) (eq $pool "default") | toJson }}
{{- end }}
{{- end }}

{{- /* What both pods of a pool have in common. Takes (root, pool, values of the pool, more node selectors). */ -}}
{{- define "gpufrac.pod" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with merge (dict) ((index . 2).nodeSelector | default dict) $root.Values.nodeSelector (index . 3) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "gpufrac.affinity" (list $root (index . 1)) }}
{{- with $root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Probes of a process: live is what a restart mends; a node without a driver is live. */ -}}
{{- define "gpufrac.probes" -}}
startupProbe:
  exec: {command: [gpufrac, status, --check=live, --process, {{ . }}]}
  periodSeconds: 2
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: {command: [gpufrac, status, --check=live, --process, {{ . }}]}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  exec: {command: [gpufrac, status, --check=ready, --process, {{ . }}]}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{- /* Directories of the config with the defaults of gpufrac. Takes a NodeConfig as a dict; gives JSON. */ -}}
{{- define "gpufrac.places" -}}
{{- $mps := .mps | default dict -}}{{- $cdi := .cdi | default dict -}}{{- $kubelet := .kubelet | default dict -}}{{- $nri := .nri | default dict -}}
{{- dict
  "run" ($mps.runRoot | default "/run/gpufrac")
  "log" ($mps.logRoot | default "/var/log/gpufrac")
  "state" (.stateRoot | default "/var/lib/gpufrac")
  "cdi" ($cdi.directory | default "/var/run/cdi")
  "kubelet" ($kubelet.root | default "/var/lib/kubelet")
  "devicePlugins" ($kubelet.devicePlugins | default "/var/lib/kubelet/device-plugins")
  "nri" (dir ($nri.socket | default "/var/run/nri/nri.sock"))
| toJson -}}
{{- end }}
